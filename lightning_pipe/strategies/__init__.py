"""Lightning strategies and their registered names.

A strategy sets up, shards or splits the model, writes and reads checkpoints, and tears down. Code belongs in this
package only if it needs Lightning and a lower-level package of the project. ``recommender``, ``language_model`` and
``in_process`` do not import each other. Callbacks import only ``strategy_info``.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_pipe.strategies.pipeline import PipelineStrategy

if TYPE_CHECKING:
    from lightning_pipe.checkpoints.export import export_checkpoint as export_checkpoint
    from lightning_pipe.llm.batches.options import Batching as Batching
    from lightning_pipe.llm.model.activation_checkpoint import ActivationCheckpoint as ActivationCheckpoint
    from lightning_pipe.llm.parallel.parallel_dims import ParallelDims as ParallelDims
    from lightning_pipe.llm.schedules.specs import ScheduleOptions as ScheduleOptions
    from lightning_pipe.llm.split.options import SplitOptions as SplitOptions
    from lightning_pipe.strategies.in_process import InProcessPipelineStrategy as InProcessPipelineStrategy
    from lightning_pipe.strategies.language_model.auto import AutoLLMPipelineStrategy as AutoLLMPipelineStrategy
    from lightning_pipe.strategies.language_model.hf_causal_lm import HFCausalLM as HFCausalLM
    from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule as PipelineModule
    from lightning_pipe.strategies.language_model.pretrained_export import export_pretrained as export_pretrained
    from lightning_pipe.strategies.language_model.strategy import LLMPipelineStrategy as LLMPipelineStrategy
    from lightning_pipe.strategies.recommender.strategy import RecsysPipelineStrategy as RecsysPipelineStrategy
    from lightning_pipe.strategies.recommender.warm_start import WarmStartOptions as WarmStartOptions

# Modules that are imported on first access, so that the other names work without their dependencies.
_MODULES = {
    "InProcessPipelineStrategy": "lightning_pipe.strategies.in_process",
    "RecsysPipelineStrategy": "lightning_pipe.strategies.recommender.strategy",
    "WarmStartOptions": "lightning_pipe.strategies.recommender.warm_start",
    "export_checkpoint": "lightning_pipe.checkpoints.export",
    "export_pretrained": "lightning_pipe.strategies.language_model.pretrained_export",
}
_LLM_MODULES = {
    "ActivationCheckpoint": "lightning_pipe.llm.model.activation_checkpoint",
    "AutoLLMPipelineStrategy": "lightning_pipe.strategies.language_model.auto",
    "Batching": "lightning_pipe.llm.batches.options",
    "HFCausalLM": "lightning_pipe.strategies.language_model.hf_causal_lm",
    "LLMPipelineStrategy": "lightning_pipe.strategies.language_model.strategy",
    "ParallelDims": "lightning_pipe.llm.parallel.parallel_dims",
    "PipelineModule": "lightning_pipe.strategies.language_model.pipeline_module",
    "ScheduleOptions": "lightning_pipe.llm.schedules.specs",
    "SplitOptions": "lightning_pipe.llm.split.options",
}

__all__ = ["PipelineStrategy", *_MODULES, *_LLM_MODULES]


def __getattr__(name: str) -> Any:
    if name in ("RecsysPipelineStrategy", "WarmStartOptions"):
        from lightning_pipe.environment import import_torchrec

        import_torchrec()
    # A command's help also looks up classes here whose modules were imported directly.
    if name in _LLM_MODULES and _LLM_MODULES[name] not in sys.modules:
        from lightning_pipe.environment import require_min_package_version

        require_min_package_version("torch", "2.13", "language models in pipeline stages")
    modules = _MODULES | _LLM_MODULES
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(modules[name]), name)
