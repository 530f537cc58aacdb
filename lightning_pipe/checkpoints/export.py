"""Makes of a checkpoint's folder one file, which other programs read. One process does.

Values are gathered in files beside the target, not in memory, which needs to hold a few of the largest pieces that a
rank wrote: a table, or a shard of one.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from lightning_pipe.checkpoints.folder_reading import (
    EXPORTED_FROM,
    check_stages,
    read_metadata,
    read_rest,
    read_whole,
)
from lightning_pipe.checkpoints.folder_writing import DYNAMIC_ROWS, META
from lightning_pipe.checkpoints.inert_values import _Refused, described
from lightning_pipe.checkpoints.safe_reading import file_named
from lightning_pipe.checkpoints.stage_layout import (
    MODEL,
    OPTIMIZERS,
    TIED,
    optimizer_part,
    with_other_names,
)
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.whole_file import whole_file

__all__ = ["export_checkpoint"]

_SHARDED_MODEL = "model"
_ANY_KIND = "by RecsysPipelineStrategy or LLMPipelineStrategy. Give the path of one"
# Of a sharded model, whose optimisers have no tables; on one device they have.
_ONLY_SHARDED = ("optimizer_states", "lr_schedulers", "sparse_lr_scheduler", DYNAMIC_ROWS)


def export_checkpoint(folder: str | Path, file: str | Path, *, weights_only: bool | None = None) -> None:
    """Make of a checkpoint that is a folder one file, as Lightning writes it for one device. One process does this.

    ``LightningModule.load_from_checkpoint`` takes the file, and ``load_state_dict`` of the module, neither sharded nor
    split, takes its ``state_dict``. Of stages the states of optimisers are there too: ``Trainer.fit(ckpt_path=...)``
    goes on from the file under Lightning's own strategies, provided that ``configure_optimizers`` has the parameters of
    each group in the model's order. Of sharded tables all states of optimisers are left out: those of fused ones have
    no place in a file of Lightning's.

    The disk of *file* needs room for the values twice meanwhile.

    Args:
        folder: what ``Trainer.save_checkpoint`` or ``ModelCheckpoint`` wrote.
        file: what is there is replaced, once all is written.
        weights_only: False to allow any class in what is no tensor, whose code runs then.

    Raises:
        SetupError: there is no such folder, it is damaged, or holds a class that is not allowed.
    """
    source, target = Path(folder), Path(file)
    if not target.absolute().parent.is_dir():
        raise SetupError(
            f"there is no folder {str(target.parent)!r} to write {target.name!r} to; make it, or name another"
        )
    saved = read_metadata(source, (MODEL, _SHARDED_MODEL), _ANY_KIND)
    of_stages = any(path[0] == MODEL for path in saved.planner_data.values())
    checkpoint = read_rest(source, weights_only)
    if of_stages:
        check_stages(source, checkpoint)
    # Private to the user, as is the file until it is whole.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as beside:
        whole = read_whole(source, saved, weights_only, None if of_stages else _SHARDED_MODEL, Path(beside))
        if of_stages:
            with file_named(source / ".metadata"):
                _put_stages(checkpoint, whole)
        else:
            if isinstance(checkpoint.get(DYNAMIC_ROWS), dict):
                names = ", ".join(map(str, checkpoint[DYNAMIC_ROWS]))
                warnings.warn(
                    f"the rows of the dynamic tables in {names} have no place in one file"
                    f" and are left out: they are in {str(source / 'rows')!r}, for"
                    " lightning_pipe.recsys.read_rows",
                    stacklevel=2,
                )
            checkpoint = {key: value for key, value in checkpoint.items() if key not in _ONLY_SHARDED}
            checkpoint["state_dict"] = whole[_SHARDED_MODEL]
        checkpoint[EXPORTED_FROM] = source.absolute().name  # not where: files travel
        with whole_file(target) as written:
            torch.save(checkpoint, written)


def _put_stages(checkpoint: dict[str, Any], whole: dict[str, Any]) -> None:
    """Put in the model's state, and those of the optimisers, by the numbers that one device gives parameters."""
    tied = checkpoint.pop(TIED, {})
    absent = sorted(set(tied.values()) - whole[MODEL].keys())
    if absent:
        raise _Refused(f"state_dict_metadata has no {described(absent[0])}, which has another name in {META}")
    checkpoint[MODEL] = with_other_names(whole[MODEL], tied)
    for number, stored in enumerate(checkpoint.get(OPTIMIZERS, ())):
        states = whole.get(optimizer_part(number), {}).get("state", {})
        if not isinstance(states, dict):
            raise _Refused(f"{optimizer_part(number)}.state is {described(states)}, expected a dict by parameter")
        names = [name for group in stored["param_groups"] for name in group["params"]]
        index = {name: place for place, name in enumerate(names)}
        unknown = sorted(map(str, states.keys() - index.keys()))
        if unknown:
            raise _Refused(
                f"{optimizer_part(number)} has a state of {described(unknown[0])}, which no group in {META} has"
            )
        checkpoint[OPTIMIZERS][number] = {
            "state": {index[name]: state for name, state in states.items()},
            "param_groups": [
                {**group, "params": [index[name] for name in group["params"]]} for group in stored["param_groups"]
            ],
        }
