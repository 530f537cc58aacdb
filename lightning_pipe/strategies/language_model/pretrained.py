"""Makes of a checkpoint's folder one that Hugging Face's ``from_pretrained`` loads. One process does.

Tested in ``tests/llm/model/test_hf_weights.py``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from lightning_pipe.checkpoints.folder_reading import differences, read_metadata, read_whole
from lightning_pipe.checkpoints.stage_layout import KIND, MODEL, other_names
from lightning_pipe.engine import SetupError
from lightning_pipe.strategies.language_model.hf_causal_lm import read_config

__all__ = ["export_pretrained"]


def export_pretrained(folder: str | Path, config: Any, target: str | Path) -> None:
    """Make of a checkpoint of stages a folder that Hugging Face's ``from_pretrained`` loads. One process does this.

    Args:
        folder: what ``Trainer.save_checkpoint`` or ``ModelCheckpoint`` wrote under ``LLMPipelineStrategy``.
        config: the model's, as :class:`~lightning_pipe.strategies.language_model.hf_causal_lm.HFCausalLM` takes it.
        target: where safetensors and the config go.

    Raises:
        SetupError: there is no such folder, it is damaged, or does not hold the model that the config describes.
    """
    from transformers import AutoModelForCausalLM

    config, source, beside = read_config(config), Path(folder), Path(target).absolute()
    saved = read_metadata(source, (MODEL,), KIND)
    beside.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{beside.name}.", dir=beside.parent) as values:
        whole = read_whole(source, saved, True, MODEL, Path(values))[MODEL]
        prefix = "model."  # of PipelineModule
        weights = {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)}
        kinds = {value.dtype for value in weights.values() if value.is_floating_point()}
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=kinds.pop() if len(kinds) == 1 else None
            )
        tied = other_names(model)
        sizes = {name: value.size() for name, value in weights.items()}
        needed = {name: value.size() for name, value in model.state_dict().items() if name not in tied}
        problems = differences(sizes, needed, strict=True)
        if problems:
            raise SetupError(
                f"the checkpoint {str(folder)!r} does not fit the {config.model_type} model of the config:"
                f" {'; '.join(problems)}. Give the config that the model was built from"
            )
        model.save_pretrained(target, state_dict=weights)
