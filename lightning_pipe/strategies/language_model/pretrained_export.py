"""Export of a checkpoint folder to the format of Hugging Face's ``from_pretrained``, on a single process."""

from __future__ import annotations

import tempfile
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_pipe._compat.transformers import stays_float32
from lightning_pipe.checkpoints.folder_reading import (
    describe_state_mismatches,
    read_extra_state,
    read_full_state,
    read_metadata,
)
from lightning_pipe.checkpoints.remote_folder import follow_checkpoint_marker, parse_local_or_remote_path
from lightning_pipe.checkpoints.stage_layout import KIND, MODEL, tied_aliases
from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.hf_weights import PretrainedWeights
from lightning_pipe.llm.model.lora import ADAPTER, add_adapters, write_adapters
from lightning_pipe.strategies.language_model.hf_causal_lm import to_pretrained_config


def export_pretrained(folder: str | Path, config: Any, target: str | Path, *, dtype: torch.dtype | None = None) -> None:
    """Export a checkpoint of stages to a folder that Hugging Face's ``from_pretrained`` loads.

    For a model with LoRA adapters, the folder holds only these, for ``peft.PeftModel.from_pretrained``. A single
    process calls this, without the ranks of the training.

    Args:
        folder: checkpoint folder, or its URL, that ``Trainer.save_checkpoint`` or ``ModelCheckpoint`` wrote under
            ``LLMPipelineStrategy``.
        config: config of the model, in any form that
            :class:`~lightning_pipe.strategies.language_model.hf_causal_lm.HFCausalLM` accepts.
        target: folder for the safetensors files and the config.
        dtype: dtype of the exported parameters (default: that of the config, such as bfloat16 after training from a
            folder in bfloat16, unless the checkpoint's is smaller; for adapters, that of the checkpoint).

    Raises:
        SetupError: If the checkpoint does not exist, is damaged, or does not contain the model of the config.
    """
    from transformers import AutoModelForCausalLM

    config = to_pretrained_config(PretrainedWeights(config).config() if isinstance(config, str | Path) else config)
    source, target_folder = follow_checkpoint_marker(parse_local_or_remote_path(folder)), Path(target).absolute()
    saved = read_metadata(source, (MODEL,), KIND)
    prefix = "model."  # of the attribute PipelineModule.model
    entries = [saved.state_dict_metadata[key] for key, path in saved.planner_data.items() if path[0] == MODEL]
    stored_as = {entry.properties.dtype for entry in entries if isinstance(entry, TensorStorageMetadata)}
    kinds = {kind for kind in stored_as if kind.is_floating_point}
    target_dtype = dtype or (getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype)
    if (
        dtype is None
        and target_dtype is not None
        and target_dtype.itemsize >= max((kind.itemsize for kind in kinds), default=0)
    ):
        target_dtype = None
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            deepcopy(config), dtype=target_dtype or (kinds.pop() if len(kinds) == 1 else None)
        )
    if (adapter := read_extra_state(source, True).get(ADAPTER)) is not None:
        model, target_dtype = add_adapters(model, adapter), dtype
        trained = {f"{prefix}{name}" for name, parameter in model.named_parameters() if parameter.requires_grad}
        entries_of_adapter = {key: path for key, path in saved.planner_data.items() if path[-1] in trained}
        saved = replace(saved, planner_data=entries_of_adapter)
    fixed = {f"{prefix}{name}" for name, _ in model.named_buffers()}

    def get_export_dtype(name: str, stored: torch.dtype) -> torch.dtype:
        if (
            target_dtype is None
            or not stored.is_floating_point
            or name in fixed
            or stays_float32(model, name, target_dtype)
        ):
            return stored
        return target_dtype

    target_folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target_folder.name}.", dir=target_folder.parent) as values:
        state_dict = read_full_state(source, saved, True, MODEL, Path(values), get_export_dtype)[MODEL]
        weights = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        tied = tied_aliases(model)
        sizes = {name: value.size() for name, value in weights.items()}
        needed = {name: value.size() for name, value in model.state_dict().items() if name not in tied}
        if adapter is not None:
            needed = {name: size for name, size in needed.items() if prefix + name in trained}
        problems = describe_state_mismatches(sizes, needed, strict=True)
        if problems:
            raise SetupError(
                f"The checkpoint {str(folder)!r} does not fit the {config.model_type} model of the config:"
                f" {'; '.join(problems)}. Pass the config that the model was built from."
            )
        if adapter is None:
            model.save_pretrained(target, state_dict=weights)
        else:
            write_adapters(model, weights, Path(target))
