"""Maps from ids to rows in a checkpoint folder, which may be of another number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_pipe._compat.managed_collision import id_map_name, is_id_map_entry
from lightning_pipe.checkpoints.compiled_names import plain_name
from lightning_pipe.checkpoints.folder_reading import allocate_target, load_state_no_dist
from lightning_pipe.checkpoints.remote_folder import Folder
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.ranks.object_collectives import run_on_all_ranks
from lightning_pipe.recsys.modules.tables import Table
from lightning_pipe.recsys.sharding.id_maps import IdMaps

HISTORIES = "id_histories"  # part of the state that holds what TorchRec's state dicts leave out


class IdMapCheckpointLoader:
    """Loads the maps of a model from a checkpoint folder. Every rank calls the same methods."""

    def __init__(
        self,
        maps: IdMaps,
        folder: Folder,
        saved: dcp.Metadata,
        weights_only: bool | None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._maps = maps
        self._folder = folder
        self._saved = saved
        self._weights_only = weights_only
        self._names = names
        self._moved = maps.find_resharded(self._read_shard_offsets, always=names is not None)

    def remove_resharded_maps(self, state: dict[str, Any]) -> None:
        """Remove the maps that :meth:`fill` redistributes from a state to fill."""
        for name in [name for name in state if any(id_map.has_state_dict_key(name) for id_map in self._moved)]:
            del state[name]

    def fill(self, *, with_histories: bool) -> None:
        """Fill what *remove_resharded_maps* has removed, and continue the histories, after all else is loaded."""
        for id_map in self._moved:
            begins = self._read_shard_offsets(id_map.buffer_names[0])
            assert begins is not None
            lost = self._maps.redistribute(id_map, begins, partial(self._read, "model"))
            if lost:
                rank_zero_warn(
                    f"{lost} ids of {id_map.name} have lost their row, because the checkpoint is from another number of"
                    " ranks or of rows, and a rank has more ids than rows. They begin anew when they are seen again"
                )
        self._maps.restore_id_histories(
            self._read_id_histories_by_rank if with_histories else lambda _: {}, self._moved
        )

    def _read_shard_offsets(self, name: str) -> list[int] | None:
        stored = self._saved.state_dict_metadata.get(f"model.{self._get_checkpoint_name(name)}")
        return (
            sorted(chunk.offsets[0] for chunk in stored.chunks) if isinstance(stored, TensorStorageMetadata) else None
        )

    def _read_id_histories_by_rank(self, name: str) -> dict[int, dict[str, Tensor]]:
        """Windows of a map, by rank of the checkpoint."""
        name, keys_by_rank = plain_name(name), dict[int, list[str]]()
        for path in (self._saved.planner_data or {}).values():
            if path[0] == HISTORIES and str(path[1]).rpartition("/")[0] == name:
                keys_by_rank.setdefault(int(path[1].rpartition("/")[2]), []).append(path[2])
        return {
            rank: self._read(f"{HISTORIES}.{name}/{rank}", sorted(keys)) for rank, keys in sorted(keys_by_rank.items())
        }

    def _get_checkpoint_name(self, name: str) -> str:
        """Name in the checkpoint of an entry of a map."""
        map_name, _, entry = name.rpartition(".")
        return name if self._names is None else f"{self._names.get(map_name, map_name)}.{entry}"

    def _read(self, part: str, names: Iterable[str]) -> dict[str, Tensor]:
        keys = {name: f"{part}.{self._get_checkpoint_name(name) if part == 'model' else name}" for name in names}
        values = {
            key: allocate_target(self._saved.state_dict_metadata.get(key), _allocate_tensor) for key in keys.values()
        }
        failed = f"the checkpoint {str(self._folder)!r} cannot be read"
        run_on_all_ranks(
            lambda: load_state_no_dist(self._folder, self._saved, values, self._weights_only), failed, dist.group.WORLD
        )
        return {name: values[key] for name, key in keys.items()}


def match_id_map_names(tables: Mapping[str, Table], names: Mapping[str, str], saved: dcp.Metadata) -> dict[str, str]:
    """Names of maps in a checkpoint of a model with other tables, by their names in the model."""
    stored = {str(path[1]).rpartition(".")[0] for path in saved.planner_data.values() if path[0] == "model"}
    stored_names = {}
    for name, table in tables.items():
        if name not in names:
            continue
        had = id_map_name(names[name]) in stored
        if had != table.maps_ids:
            raise SetupError(
                f"init_from: table {name} {'maps' if table.maps_ids else 'does not map'} ids to its rows (managed"
                f" collision), but the table in the checkpoint {'does' if had else 'does not'}. Give the table another"
                " name, so that it starts with initial values."
            )
        if had:
            stored_names[id_map_name(name)] = id_map_name(names[name])
    return stored_names


def drop_id_maps_from_metadata(saved: dcp.Metadata) -> dcp.Metadata:
    """Return a copy of the metadata without the maps, which are matched by their tables."""
    planner_data = {
        key: path
        for key, path in saved.planner_data.items()
        if not (path[0] == "model" and is_id_map_entry(str(path[1])))
    }
    return replace(saved, planner_data=planner_data)


def _allocate_tensor(size: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype)
