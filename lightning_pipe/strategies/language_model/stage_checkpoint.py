"""Checkpoints of a model in stages: a folder, keyed by the unsplit model's names, whatever the split.

Every rank writes its stages' part of the module's ``state_dict`` and, by parameter, its part of the optimisers' states.
So another number of stages, another schedule or another sharding reads the same folder: each rank takes what it holds.
The layout is that of Lightning's own distributed checkpoints: ``state_dict``, ``optimizer_0``, and ``meta.pt``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint._traverse import set_element
from torch.optim import Optimizer

from lightning_pipe.checkpoints.folder_reading import (
    check_stages,
    fill_from_folder,
    misfits,
    read_metadata,
    read_rest,
    room,
)
from lightning_pipe.checkpoints.folder_writing import WriteFolder, write_folder
from lightning_pipe.checkpoints.named_optimizer import (
    Group,
    by_name,
    held_names,
    merge_groups,
    optimizer_problems,
    pack_state,
)
from lightning_pipe.checkpoints.stage_layout import (
    KIND,
    MODEL,
    OPTIMIZERS,
    TIED,
    optimizer_part,
    other_names,
    with_other_names,
)
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.together import gather, on_all_ranks

__all__ = ["load_stage_checkpoint", "save_stage_checkpoint"]

_FIX = "Build the module, and its optimiser, as when it was written"


def save_stage_checkpoint(
    checkpoint: dict[str, Any],
    path: str | Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    order: Sequence[str],
    write: WriteFolder = write_folder,
) -> None:
    """Write *checkpoint*, as Lightning made it, to the folder *path*; every rank calls this.

    Args:
        checkpoint: Lightning's dictionary: ``state_dict`` and ``optimizer_states`` of what this rank holds, and the
            rest, of which rank 0's is kept.
        path: the same on every rank, which all ranks can write to. What is there is replaced.
        module: this rank's part of it.
        optimizers: those of ``optimizer_states``.
        order: names of the unsplit module's parameters. An exported checkpoint numbers a group's parameters so.
        write: writes the folder, at once or in the background.

    Raises:
        SetupError: on every rank, if any cannot write; what was there before is as it was.
    """
    rest = {key: value for key, value in checkpoint.items() if key not in (MODEL, OPTIMIZERS)}
    tied = {alias: name for names in gather(other_names(module), dist.group.WORLD) for alias, name in names.items()}
    if tied:
        rest[TIED] = tied
    state: dict[str, Any] = {MODEL: {name: value for name, value in checkpoint[MODEL].items() if name not in tied}}
    if OPTIMIZERS in checkpoint:
        held = held_names(optimizers, module, f"the checkpoint {str(path)!r} cannot be written")
        groups = []
        for number, (names, packed) in enumerate(zip(held, checkpoint[OPTIMIZERS], strict=True)):
            state[optimizer_part(number)] = {"state": {names[index]: value for index, value in packed["state"].items()}}
            groups.append([by_name(group, names) for group in packed["param_groups"]])
        rest[OPTIMIZERS] = [
            {"param_groups": merge_groups(ranks, order)}
            for ranks in zip(*gather(groups, dist.group.WORLD), strict=True)
        ]
    write(path, state, rest)


def load_stage_checkpoint(
    path: str | Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer] | None,
    *,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Read what this rank holds from the folder *path*; every rank calls this.

    Args:
        path: what :func:`save_stage_checkpoint` wrote, on whatever stages.
        module: this rank's part of it; its tensors are filled.
        optimizers: whose states to read, where the checkpoint has them; None for the module's alone.
        strict: whether the checkpoint must hold just what the module does, all ranks' parts together.
        weights_only: False to allow any class in what is no tensor, whose code runs then.

    Returns:
        Lightning's dictionary, its ``state_dict`` and ``optimizer_states`` those of this rank's part.

    Raises:
        SetupError: on every rank, if any finds no such folder, or the checkpoint is of another model or optimiser,
            or damaged.
    """
    folder = Path(path)
    failed = f"the checkpoint {str(folder)!r} cannot be read"

    def read() -> tuple[Any, dict[str, Any]]:
        found = read_metadata(folder, (MODEL,), KIND), read_rest(folder, weights_only)
        check_stages(folder, found[1])
        return found

    saved, rest = on_all_ranks(read, failed, dist.group.WORLD)
    rest.pop(TIED, None)
    stored = rest.pop(OPTIMIZERS, None)
    with_states = stored is not None and optimizers is not None
    trained = list(optimizers or ()) if with_states else []
    held = held_names(trained, module, failed)
    groups: list[list[Group]] = [entry["param_groups"] for entry in stored] if with_states else []
    tied = other_names(module)
    state: dict[str, Any] = {MODEL: {name: value for name, value in module.state_dict().items() if name not in tied}}
    problems = misfits(saved, state, strict) + optimizer_problems(groups, held, trained)
    if problems:
        raise SetupError(f"the checkpoint {str(folder)!r} does not fit the module: {'; '.join(problems)}. {_FIX}")
    parameters = dict(module.named_parameters())
    for number, names in enumerate(held):
        states = _room_for_states(saved, optimizer_part(number), {name: parameters[name] for name in names})
        state[optimizer_part(number)] = {"state": states}
    fill_from_folder(folder, saved, state, strict=strict, weights_only=weights_only, fix=_FIX)
    if with_states:
        rest[OPTIMIZERS] = [
            pack_state(optimizer, names, of_optimizer, state[optimizer_part(number)]["state"])
            for number, (optimizer, names, of_optimizer) in enumerate(zip(trained, held, groups, strict=True))
        ]
    return {**rest, MODEL: with_other_names(state[MODEL], tied)}


def _room_for_states(saved: dcp.Metadata, part: str, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Something to load each of the parameters' states into; what has a parameter's size is sharded as it is."""
    states: dict[str, Any] = {}
    for key, path in (saved.planner_data or {}).items():
        if path[:2] == (part, "state") and len(path) > 3 and path[2] in parameters:
            like = parameters[path[2]]
            set_element(states, path[2:], room(saved.state_dict_metadata[key], partial(_empty, like)))
    return states


def _empty(like: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    if like.size() == size:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype)
