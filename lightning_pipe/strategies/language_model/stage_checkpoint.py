"""Checkpoints of a model in stages: a folder with the names of the unsplit model, independent of the split.

Every rank writes its part of the module's ``state_dict`` and, by parameter, its part of the optimizer states. Since
each rank reads only the entries that it holds, the folder can be read with another number of stages, another schedule
or another sharding. The layout is that of Lightning's distributed checkpoints: ``state_dict``, ``optimizer_0``, and
``meta.pt``.
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
from torch.optim import Optimizer

from lightning_pipe._compat.torch import set_element
from lightning_pipe.checkpoints.compiled_names import CompiledNameMap, plain_name, under_plain_names
from lightning_pipe.checkpoints.folder_reading import (
    allocate_target,
    find_checkpoint_mismatches,
    load_in_place,
    read_extra_state,
    read_metadata,
)
from lightning_pipe.checkpoints.folder_writing import WriteFolder, write_checkpoint
from lightning_pipe.checkpoints.optimizer_state import (
    Group,
    find_optimizer_mismatches,
    make_optimizer_state_dict,
    merge_param_groups_of_ranks,
    optimizer_parameter_names,
    replace_numbers_by_names,
)
from lightning_pipe.checkpoints.remote_folder import Folder, follow_checkpoint_marker, parse_local_or_remote_path
from lightning_pipe.checkpoints.stage_layout import (
    KIND,
    MODEL,
    OPTIMIZERS,
    TIED,
    add_tied_aliases,
    get_optimizer_checkpoint_key,
    tied_aliases,
)
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects, run_on_all_ranks
from lightning_pipe.llm.model.lora import ADAPTER, serialize_lora_config

_FIX = "Build the module and its optimizers as in the run that wrote the checkpoint"


def save_stage_checkpoint(
    checkpoint: dict[str, Any],
    path: str | Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    order: Sequence[str],
    write: WriteFolder = write_checkpoint,
) -> None:
    """Write Lightning's *checkpoint* dictionary to the folder *path*. Every rank must call this."""
    meta = {key: value for key, value in checkpoint.items() if key not in (MODEL, OPTIMIZERS)}
    tied = {
        alias: name
        for names in all_gather_objects(tied_aliases(module), dist.group.WORLD)
        for alias, name in names.items()
    }
    if tied:
        meta[TIED] = {plain_name(alias): plain_name(name) for alias, name in tied.items()}
    if (text := serialize_lora_config(getattr(module, "model", None))) is not None:
        meta[ADAPTER] = text
    values = {name: value for name, value in checkpoint[MODEL].items() if name not in tied}
    state: dict[str, Any] = {MODEL: under_plain_names(values)}
    if OPTIMIZERS in checkpoint:
        names_by_optimizer = optimizer_parameter_names(
            optimizers, module, f"the checkpoint {str(path)!r} cannot be written"
        )
        groups = []
        for number, (module_names, packed) in enumerate(zip(names_by_optimizer, checkpoint[OPTIMIZERS], strict=True)):
            names = [*map(plain_name, module_names)]
            state[get_optimizer_checkpoint_key(number)] = {
                "state": {names[index]: value for index, value in packed["state"].items()}
            }
            groups.append([replace_numbers_by_names(group, names) for group in packed["param_groups"]])
        meta[OPTIMIZERS] = [
            {"param_groups": merge_param_groups_of_ranks(ranks, [*map(plain_name, order)])}
            for ranks in zip(*all_gather_objects(groups, dist.group.WORLD), strict=True)
        ]
    write(path, state, meta)


def load_stage_checkpoint(
    path: str | Path,
    module: nn.Module,
    optimizers: Sequence[Optimizer] | None,
    *,
    strict: bool = True,
    weights_only: bool | None = None,
) -> dict[str, Any]:
    """Read the stages of this rank from the folder *path*. Every rank must call this."""
    failed = f"the checkpoint {str(path)!r} cannot be read"

    def read_metadata_and_extra_state() -> tuple[Folder, Any, dict[str, Any]]:
        opened = follow_checkpoint_marker(parse_local_or_remote_path(path))
        return opened, read_metadata(opened, (MODEL,), KIND), read_extra_state(opened, weights_only)

    folder, saved, meta = run_on_all_ranks(read_metadata_and_extra_state, failed, dist.group.WORLD)
    for key in (TIED, ADAPTER):
        meta.pop(key, None)
    stored = meta.pop(OPTIMIZERS, None)
    with_states = stored is not None and optimizers is not None
    trained = list(optimizers or ()) if with_states else []
    names_by_optimizer = optimizer_parameter_names(trained, module, failed)
    groups: list[list[Group]] = [entry["param_groups"] for entry in stored] if with_states else []
    tied = tied_aliases(module)
    state: dict[str, Any] = {MODEL: {name: value for name, value in module.state_dict().items() if name not in tied}}
    ranks = all_gather_objects(
        [*state[MODEL], *(name for names in names_by_optimizer for name in names)], dist.group.WORLD
    )
    module_names = CompiledNameMap(name for names in ranks for name in names)
    saved = module_names.rename_metadata(saved)
    groups = [
        [{**group, "params": [module_names(name) for name in group["params"]]} for group in of_optimizer]
        for of_optimizer in groups
    ]
    problems = find_checkpoint_mismatches(saved, state, strict) + find_optimizer_mismatches(
        groups, names_by_optimizer, trained
    )
    if problems:
        raise SetupError(f"The checkpoint {str(path)!r} does not fit the module: {'; '.join(problems)}. {_FIX}.")
    parameters = dict(module.named_parameters())
    for number, names in enumerate(names_by_optimizer):
        states = _allocate_states(
            saved, get_optimizer_checkpoint_key(number), {name: parameters[name] for name in names}
        )
        state[get_optimizer_checkpoint_key(number)] = {"state": states}
    load_in_place(folder, saved, state, strict=strict, weights_only=weights_only, fix=_FIX)
    if with_states:
        meta[OPTIMIZERS] = [
            make_optimizer_state_dict(
                optimizer, names, of_optimizer, state[get_optimizer_checkpoint_key(number)]["state"]
            )
            for number, (optimizer, names, of_optimizer) in enumerate(
                zip(trained, names_by_optimizer, groups, strict=True)
            )
        ]
    return {**meta, MODEL: add_tied_aliases(state[MODEL], tied)}


def _allocate_states(saved: dcp.Metadata, part: str, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Allocate tensors for the optimizer states of *parameters*. States of a parameter's size are sharded like it."""
    states: dict[str, Any] = {}
    for key, path in (saved.planner_data or {}).items():
        if path[:2] == (part, "state") and len(path) > 3 and path[2] in parameters:
            like = parameters[path[2]]
            set_element(
                states, path[2:], allocate_target(saved.state_dict_metadata[key], partial(_allocate_state_tensor, like))
            )
    return states


def _allocate_state_tensor(like: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    if like.size() == size:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(size, dtype=dtype)
