"""Export of a checkpoint folder to the format of Hugging Face's ``from_pretrained``, on a single process.

Tested in ``tests/llm/model/test_hf_weights.py``.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from lightning_pipe.checkpoints.folder_reading import differences, read_metadata, read_whole
from lightning_pipe.checkpoints.remote_folder import open_folder, place_of
from lightning_pipe.checkpoints.stage_layout import KIND, MODEL, other_names
from lightning_pipe.engine import SetupError
from lightning_pipe.strategies.language_model.hf_causal_lm import read_config
from lightning_pipe.strategies.language_model.older_names import under_own_names

__all__ = ["export_pretrained"]


def export_pretrained(folder: str | Path, config: Any, target: str | Path) -> None:
    """Export a checkpoint of stages to a folder that Hugging Face's ``from_pretrained`` loads.

    A single process calls this, without the ranks of the training.

    Args:
        folder: checkpoint folder, or its URL, that ``Trainer.save_checkpoint`` or ``ModelCheckpoint`` wrote under
            ``LLMPipelineStrategy``.
        config: config of the model, in any form that
            :class:`~lightning_pipe.strategies.language_model.hf_causal_lm.HFCausalLM` accepts, except a folder.
        target: folder for the safetensors files and the config.

    Raises:
        SetupError: If the checkpoint does not exist, is damaged, or does not contain the model of the config.
    """
    from transformers import AutoModelForCausalLM

    config, source, beside = read_config(config), open_folder(place_of(folder)), Path(target).absolute()
    saved = read_metadata(source, (MODEL,), KIND)
    beside.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{beside.name}.", dir=beside.parent) as values:
        whole = read_whole(source, saved, True, MODEL, Path(values))[MODEL]
        prefix = "model."  # of the attribute PipelineModule.model
        weights = {name.removeprefix(prefix): value for name, value in whole.items() if name.startswith(prefix)}
        kinds = {value.dtype for value in weights.values() if value.is_floating_point()}
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, dtype=kinds.pop() if len(kinds) == 1 else None
            )
        weights = under_own_names(model, weights)
        tied = other_names(model)
        sizes = {name: value.size() for name, value in weights.items()}
        needed = {name: value.size() for name, value in model.state_dict().items() if name not in tied}
        problems = differences(sizes, needed, strict=True)
        if problems:
            raise SetupError(
                f"The checkpoint {str(folder)!r} does not fit the {config.model_type} model of the config:"
                f" {'; '.join(problems)}. Pass the config that the model was built from."
            )
        model.save_pretrained(target, state_dict=weights)
