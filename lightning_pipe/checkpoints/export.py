"""Exports a checkpoint folder to a single file that other programs can read. Runs in one process.

Values are gathered in temporary files next to the target rather than in memory. Memory only has to hold a few of the
largest pieces that a rank wrote, such as a table or a shard of a table.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from lightning_pipe.checkpoints.folder_reading import read_extra_state, read_full_state, read_metadata
from lightning_pipe.checkpoints.folder_writing import DYNAMIC_ROWS
from lightning_pipe.checkpoints.remote_folder import follow_checkpoint_marker, parse_local_or_remote_path
from lightning_pipe.checkpoints.stage_layout import (
    MODEL,
    OPTIMIZERS,
    TIED,
    add_tied_aliases,
    get_optimizer_checkpoint_key,
)
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.atomic_file import atomic_write

_SHARDED_MODEL = "model"
_ANY_KIND = "by RecsysPipelineStrategy or LLMPipelineStrategy. Give the path of one"
# Entries of a sharded model that are left out of the file: its optimizers hold no tables, those of one device do.
_ONLY_SHARDED = ("optimizer_states", "lr_schedulers", "sparse_lr_scheduler", "table_optimizers", DYNAMIC_ROWS)


def export_checkpoint(folder: str | Path, file: str | Path, *, weights_only: bool | None = None) -> None:
    """Export a checkpoint folder to a single file in Lightning's single-device format. Call this in one process.

    ``LightningModule.load_from_checkpoint`` accepts the file, and ``load_state_dict`` of the unsharded, unsplit module
    accepts its ``state_dict``. For a model in stages the file also holds the optimizer states:
    ``Trainer.fit(ckpt_path=...)`` resumes from it under Lightning's own strategies, provided that
    ``configure_optimizers`` lists the parameters of each group in the model's order. For a model with sharded tables
    all optimizer states are left out, because Lightning's format has no place for those of fused optimizers.

    During the export, the disk of *file* needs space for two copies of the values.

    Args:
        folder: checkpoint folder, or its URL, that ``Trainer.save_checkpoint`` or ``ModelCheckpoint`` wrote.
        file: path of the file to write. An existing file is replaced after everything has been written.
        weights_only: False to allow any class among the values that are not tensors (default None: only tensors, plain
            types and allowed classes). The code of these classes then runs.

    Raises:
        SetupError: the folder does not exist, is damaged, or holds a class that is not allowed.
    """
    place, target = parse_local_or_remote_path(folder), Path(file)
    if not target.absolute().parent.is_dir():
        raise SetupError(
            f"there is no folder {str(target.parent)!r} to write {target.name!r} to. Create it, or give another path"
        )
    source = follow_checkpoint_marker(place)
    saved = read_metadata(source, (MODEL, _SHARDED_MODEL), _ANY_KIND)
    has_stages = any(path[0] == MODEL for path in saved.planner_data.values())
    checkpoint = read_extra_state(source, weights_only)
    # The temporary folder is private to the user, as is the file until it is complete.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as temporary:
        values = read_full_state(source, saved, weights_only, None if has_stages else _SHARDED_MODEL, Path(temporary))
        if has_stages:
            _add_model_and_optimizer_states(checkpoint, values)
        else:
            if isinstance(checkpoint.get(DYNAMIC_ROWS), dict):
                names = ", ".join(map(str, checkpoint[DYNAMIC_ROWS]))
                warnings.warn(
                    f"the rows of the dynamic tables in {names} have no place in one file"
                    f" and are left out. Read them from {str(source / 'rows')!r} with"
                    " lightning_pipe.recsys.read_rows",
                    stacklevel=2,
                )
            checkpoint = {key: value for key, value in checkpoint.items() if key not in _ONLY_SHARDED}
            checkpoint["state_dict"] = values[_SHARDED_MODEL]
        with atomic_write(target) as written:
            torch.save(checkpoint, written)


def _add_model_and_optimizer_states(checkpoint: dict[str, Any], values: dict[str, Any]) -> None:
    """Add the states of the model and of the optimizers to *checkpoint*, with parameters numbered as on one device."""
    checkpoint[MODEL] = add_tied_aliases(values[MODEL], checkpoint.pop(TIED, {}))
    for number, stored in enumerate(checkpoint.get(OPTIMIZERS, ())):
        states = values.get(get_optimizer_checkpoint_key(number), {}).get("state", {})
        names = [name for group in stored["param_groups"] for name in group["params"]]
        index = {name: place for place, name in enumerate(names)}
        checkpoint[OPTIMIZERS][number] = {
            "state": {index[name]: state for name, state in states.items()},
            "param_groups": [
                {**group, "params": [index[name] for name in group["params"]]} for group in stored["param_groups"]
            ],
        }
