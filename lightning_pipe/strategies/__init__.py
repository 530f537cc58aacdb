"""Thin Lightning strategies: set-up, sharding or splitting, checkpoints, teardown; and their names."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_pipe.strategies.pipeline import PipelineStrategy

if TYPE_CHECKING:
    from lightning_pipe.checkpoints.export import export_checkpoint
    from lightning_pipe.llm.batches.batching import Batching
    from lightning_pipe.llm.model.activation_checkpoint import ActivationCheckpoint
    from lightning_pipe.llm.parallel.dimensions import ParallelDims
    from lightning_pipe.llm.split.options import SplitOptions
    from lightning_pipe.llm.split.traced_split import SplitPoint, pipe_split
    from lightning_pipe.strategies.in_process import InProcessPipelineStrategy
    from lightning_pipe.strategies.language_model.auto import AutoLLMPipelineStrategy
    from lightning_pipe.strategies.language_model.hf_causal_lm import HFCausalLM
    from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule
    from lightning_pipe.strategies.language_model.pretrained import export_pretrained
    from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy
    from lightning_pipe.strategies.recommender.strategy import RecsysPipelineStrategy

__all__ = [
    "ActivationCheckpoint",
    "AutoLLMPipelineStrategy",
    "Batching",
    "HFCausalLM",
    "InProcessPipelineStrategy",
    "LLMPipelineStrategy",
    "ParallelDims",
    "PipelineModule",
    "PipelineStrategy",
    "RecsysPipelineStrategy",
    "SplitOptions",
    "SplitPoint",
    "export_checkpoint",
    "export_pretrained",
    "pipe_split",
]

# Modules that need the PyTorch of language models.
_LLM = {
    "ActivationCheckpoint": "lightning_pipe.llm.model.activation_checkpoint",
    "AutoLLMPipelineStrategy": "lightning_pipe.strategies.language_model.auto",
    "Batching": "lightning_pipe.llm.batches.batching",
    "HFCausalLM": "lightning_pipe.strategies.language_model.hf_causal_lm",
    "LLMPipelineStrategy": "lightning_pipe.strategies.language_model.strategy",
    "ParallelDims": "lightning_pipe.llm.parallel.dimensions",
    "PipelineModule": "lightning_pipe.strategies.language_model.pipeline_module",
    "SplitOptions": "lightning_pipe.llm.split.options",
    "SplitPoint": "lightning_pipe.llm.split.traced_split",
    "pipe_split": "lightning_pipe.llm.split.traced_split",
}


def __getattr__(name: str) -> Any:
    # What a strategy is built on is imported when it is asked for, so that the others work without it.
    if name == "RecsysPipelineStrategy":
        from lightning_pipe.environment import import_torchrec

        import_torchrec()
        from lightning_pipe.strategies.recommender.strategy import RecsysPipelineStrategy

        return RecsysPipelineStrategy
    if name == "InProcessPipelineStrategy":
        from lightning_pipe.strategies.in_process import InProcessPipelineStrategy

        return InProcessPipelineStrategy
    if name in _LLM:
        from lightning_pipe.environment import require_torch

        require_torch("2.13", "language models in pipeline stages")
        return getattr(import_module(_LLM[name]), name)
    if name == "export_checkpoint":
        from lightning_pipe.checkpoints.export import export_checkpoint

        return export_checkpoint
    if name == "export_pretrained":
        from lightning_pipe.strategies.language_model.pretrained import export_pretrained

        return export_pretrained
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
