"""Checkpoints of a sharded model: a folder with the shards of tables and the states of their fused optimizers.

The rest of Lightning's checkpoint (loops, callbacks, dense optimizers) is the same on every rank; rank 0 writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_pipe._compat.managed_collision import is_id_map_entry
from lightning_pipe.checkpoints.compiled_names import CompiledNameMap, under_plain_names
from lightning_pipe.checkpoints.folder_reading import (
    find_checkpoint_mismatches,
    gather_state_sizes,
    load_in_place,
    read_extra_state,
    read_metadata,
)
from lightning_pipe.checkpoints.folder_writing import DYNAMIC_ROWS, WriteFolder, write_checkpoint
from lightning_pipe.checkpoints.remote_folder import (
    Folder,
    follow_checkpoint_marker,
    local_copy,
    parse_local_or_remote_path,
)
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.object_collectives import run_on_all_ranks
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from lightning_pipe.strategies.recommender.id_map_checkpoint import (
    HISTORIES,
    IdMapCheckpointLoader,
    drop_id_maps_from_metadata,
    match_id_map_names,
)
from lightning_pipe.strategies.recommender.warm_start import CheckpointMatch, WarmStartOptions, match_checkpoint
from lightning_pipe.strategies.recommender.weight_averaging import AVERAGING, TRAINED, ShardedWeightAverages

# Key of Lightning's dictionary for the class of each table's optimizer.
TABLE_OPTIMIZERS = "table_optimizers"
_KIND = "under a recsys plan. Use the path of such a folder, or load the module's state before it is sharded"
_FIX = (
    "Build the module as in the run that wrote it. If its tables have changed, set strict_loading = False in the module"
    " to continue with other tables, or start a new run with the strategy's init_from"
)


def save_sharded_checkpoint(
    checkpoint: dict[str, Any], path: str | Path, sharded: ShardedModel, write: WriteFolder = write_checkpoint
) -> None:
    """Write Lightning's checkpoint of a sharded model to a folder. Every rank calls this function."""
    sharded.sync_replicas()  # in place, so the tensors in the dictionary are averaged too
    rest = {key: value for key, value in checkpoint.items() if key not in ("state_dict", TRAINED)}
    state = {"model": under_plain_names(sharded.drop_dynamic_entries(checkpoint["state_dict"]))}
    if TRAINED in checkpoint:
        state[TRAINED] = under_plain_names(checkpoint[TRAINED])
    if "optimizer_states" in checkpoint:
        for key, part in _get_table_optimizer_states(sharded).items():
            state[key] = {**part, "state": under_plain_names(part["state"])}
        kinds = {name: table.resolved_optimizer.name for name, table in sharded.tables.items()}
        rest[TABLE_OPTIMIZERS] = under_plain_names(kinds)
        if histories := sharded.id_maps.collect_id_histories():
            state[HISTORIES] = under_plain_names(histories)
    dumped = sharded.prepare_row_dump() if sharded.dynamic_rows else None
    if dumped is not None:
        rest[DYNAMIC_ROWS] = dumped.committed
    write(path, state, rest, dumped)


def load_sharded_checkpoint(
    path: str | Path,
    sharded: ShardedModel,
    *,
    with_optimizers: bool,
    strict: bool = True,
    weights_only: bool | None = None,
    averages: ShardedWeightAverages | None = None,
) -> dict[str, Any]:
    """Load a model and the states of its tables' optimizers from a folder. Every rank calls this function.

    With *averages*, the checkpoint's averaged weights are loaded there, too, and to continue training
    (*with_optimizers*), its trained weights are loaded into the model.
    """
    folder, saved, rest = _read_metadata_on_all_ranks(path, weights_only)
    rest.pop(TABLE_OPTIMIZERS, None)
    state: dict[str, Any] = {"model": _get_model_state_dict(sharded)}
    if with_optimizers and "optimizer_states" in rest:
        state |= _get_table_optimizer_states(sharded)
    saved = _collect_state_dict_names(gather_state_sizes(state)).rename_metadata(saved)
    problems = find_checkpoint_mismatches(saved, state, strict)
    if problems:
        raise SetupError(f"the checkpoint {str(path)!r} does not fit the module: {'; '.join(problems)}. {_FIX}")
    if not strict and (left_out := find_checkpoint_mismatches(saved, state, True)):
        rank_zero_info(f"strict_loading is False; checkpoint {str(path)!r} has other values: {'; '.join(left_out)}")
    maps = IdMapCheckpointLoader(sharded.id_maps, folder, saved, weights_only)
    maps.remove_resharded_maps(state["model"])
    load_in_place(folder, saved, state, strict=strict, weights_only=weights_only, fix=_FIX)
    _load_model_and_table_optimizer_states(sharded, state["model"], state.get("tables", {}).get("state", {}))
    if averages is not None:
        read_trained = partial(_load_trained_values, folder, saved, sharded, weights_only)
        averages.load(read_trained if with_optimizers else None, rest.get(AVERAGING))
    maps.fill(with_histories=with_optimizers)
    # States are read for evaluations too: the rows are committed, and training may continue from the store.
    _load_dynamic_rows(folder, rest.pop(DYNAMIC_ROWS, None), sharded, with_optimizers="optimizer_states" in rest)
    return {**rest, "state_dict": {}}


def _load_trained_values(folder: Folder, saved: Any, sharded: ShardedModel, weights_only: bool | None) -> None:
    """Load the weights that training continues with, where these differ from the part ``model``."""
    names = {path[1] for path in saved.planner_data.values() if path[0] == TRAINED}
    state = {TRAINED: {name: value for name, value in _get_model_state_dict(sharded).items() if name in names}}
    load_in_place(folder, saved, state, strict=True, weights_only=weights_only, fix=_FIX)
    _load_model_and_table_optimizer_states(sharded, state[TRAINED], {})


def start_from_checkpoint(options: WarmStartOptions, sharded: ShardedModel, weights_only: bool | None = None) -> None:
    """Replace a model's initial values by those of a checkpoint, and log which. Every rank calls this function."""
    folder, saved, rest = _read_metadata_on_all_ranks(options.path, weights_only)
    keep = options.optimizer_states == "keep"
    model = {name: value for name, value in _get_model_state_dict(sharded).items() if not is_id_map_entry(name)}
    states = _get_table_optimizer_states(sharded).get("tables", {}).get("state", {}) if keep else {}
    sizes = gather_state_sizes({"model": model, "tables": {"state": states}})
    names = _collect_state_dict_names(sizes)
    saved, optimizers = names.rename_metadata(saved), rest.get(TABLE_OPTIMIZERS)
    if isinstance(optimizers, dict):
        optimizers = names.rename_keys(optimizers)
    world, failed = dist.group.WORLD, "init_from cannot be used"

    def match_checkpoint_to_model() -> tuple[CheckpointMatch, dict[str, str]]:
        matched = match_checkpoint(options, drop_id_maps_from_metadata(saved), optimizers, sizes, sharded.tables)
        return matched, match_id_map_names(sharded.tables, matched.names, saved)

    matched, of_maps = run_on_all_ranks(match_checkpoint_to_model, failed, world)
    maps = IdMapCheckpointLoader(sharded.id_maps, folder, saved, weights_only, of_maps)
    for rows in sharded.dynamic_rows.values():
        run_on_all_ranks(rows.check_no_existing_rows, failed, world)
    state: dict[str, Any] = {"model": matched.rename_to_checkpoint_names(model)}
    if of_tables := matched.rename_to_checkpoint_names(states):
        state["tables"] = {"state": of_tables}
    load_in_place(folder, matched.saved, state, strict=True, weights_only=weights_only, fix=_FIX)
    filled = {name: state["model"][stored_name] for name, stored_name in matched.names.items() if name in model}
    _load_model_and_table_optimizer_states(
        sharded, filled, {name: states[name] for name in matched.names if name in states}
    )
    maps.fill(with_histories=False)
    _load_dynamic_rows(folder, rest.get(DYNAMIC_ROWS), sharded, with_optimizers=keep)
    rank_zero_info(matched.report)
    if matched.dropped:
        rank_zero_warn(matched.dropped)


def _read_metadata_on_all_ranks(path: str | Path, weights_only: bool | None) -> tuple[Folder, Any, dict[str, Any]]:
    """Read the metadata of a checkpoint, and the values that rank 0 wrote, on every rank."""

    def read_metadata_and_extra_state() -> tuple[Folder, Any, dict[str, Any]]:
        opened = follow_checkpoint_marker(parse_local_or_remote_path(path))
        return opened, read_metadata(opened, ("model",), _KIND), read_extra_state(opened, weights_only)

    return run_on_all_ranks(
        read_metadata_and_extra_state, f"the checkpoint {str(path)!r} cannot be read", dist.group.WORLD
    )


def _collect_state_dict_names(sizes: Mapping[tuple[Any, ...], Any]) -> CompiledNameMap:
    """Names of the values whose sizes are those of all ranks."""
    return CompiledNameMap(path[1] for path in sizes if path[0] == "model")


def _load_model_and_table_optimizer_states(
    sharded: ShardedModel, model: Mapping[str, Any], states: Mapping[str, Any]
) -> None:
    """Load values of the model and states of its tables' optimizers by name."""
    if sharded.replicas is not None:
        sharded.replicas.steps = 0  # all replicas have read the same values
    sharded.dmp.load_state_dict({**sharded.dmp.state_dict(), **model})
    if states:
        present = sharded.fused_optimizer.state_dict()
        sharded.fused_optimizer.load_state_dict({**present, "state": {**present["state"], **states}})


def _load_dynamic_rows(folder: Folder, committed: Any, sharded: ShardedModel, *, with_optimizers: bool) -> None:
    if sharded.dynamic_rows:
        with ExitStack() as stack:
            failed = f"the checkpoint {str(folder)!r} cannot be read"
            local = run_on_all_ranks(lambda: stack.enter_context(local_copy(folder, "rows")), failed, dist.group.WORLD)
            sharded.read_rows_from_folder(local, committed, with_optimizers=with_optimizers)


def _get_model_state_dict(sharded: ShardedModel) -> dict[str, Any]:
    """State dict of the model, with this rank's parts, without the entries of dynamic tables."""
    return sharded.drop_dynamic_entries(sharded.dmp.state_dict())


def _get_table_optimizer_states(sharded: ShardedModel) -> dict[str, Any]:
    """Return the part ``tables``: the optimizers' states without those of dynamic tables, which are part of the rows.

    Parameters without a state, as under SGD, are left out. Without any state, there is no part. On a rank without
    shards of some table, PyTorch's planner takes an empty dictionary for a value that the checkpoint must have.
    """
    state = sharded.fused_optimizer.state_dict()
    states = {
        name: table_state for name, table_state in sharded.drop_dynamic_entries(state["state"]).items() if table_state
    }
    return {"tables": {**state, "state": states}} if states else {}
