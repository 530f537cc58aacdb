"""Maps from ids to rows in a checkpoint folder, which may be of another number of ranks.

Tested in ``tests/scenarios/recommenders/test_managed_collision.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_pipe.checkpoints.folder_reading import fill_alone, room
from lightning_pipe.checkpoints.remote_folder import Folder
from lightning_pipe.engine.ranks.together import on_all_ranks
from lightning_pipe.recsys.sharding.id_maps import IdMaps

__all__ = ["WINDOWS", "MapsInFolder"]

WINDOWS = "id_windows"  # part of the state that holds what TorchRec's state dicts leave out


class MapsInFolder:
    """Loads the maps of a model from a checkpoint folder. Every rank calls the same methods.

    Args:
        maps: maps of the model.
        folder: the folder.
        saved: its metadata.
        weights_only: see :func:`~lightning_pipe.checkpoints.folder_reading.read_rest`.
    """

    def __init__(self, maps: IdMaps, folder: Folder, saved: dcp.Metadata, weights_only: bool | None) -> None:
        self._maps = maps
        self._folder = folder
        self._saved = saved
        self._weights_only = weights_only
        self._moved = maps.moved(self._begins)

    def leave_out(self, state: dict[str, Any]) -> None:
        """Remove the maps that :meth:`fill` redistributes from a state to fill."""
        for name in [name for name in state if any(one.owns(name) for one in self._moved)]:
            del state[name]

    def fill(self, failed: str, *, with_windows: bool) -> None:
        """Fill what *leave_out* has removed, and continue the windows, after all else is loaded.

        Args:
            failed: beginning of the error message.
            with_windows: False to begin new windows.
        """
        for one in self._moved:
            begins = self._begins(one.names[0])
            assert begins is not None
            read = partial(self._read, "model", failed=failed)
            lost = self._maps.redistribute(one, begins, read)
            if lost:
                rank_zero_warn(
                    f"{lost} ids of {one.name} have lost their row, because the checkpoint is from another number of"
                    " ranks, and a rank has more ids than rows. They begin anew when they are seen again"
                )
        self._maps.set_windows(partial(self._windows, failed) if with_windows else lambda _: [], self._moved)

    def _begins(self, name: str) -> list[int] | None:
        stored = self._saved.state_dict_metadata.get(f"model.{name}")
        return (
            sorted(chunk.offsets[0] for chunk in stored.chunks) if isinstance(stored, TensorStorageMetadata) else None
        )

    def _windows(self, failed: str, name: str) -> list[dict[str, Tensor]]:
        """Windows of a map, of each rank of the checkpoint."""
        found: dict[int, list[str]] = {}
        for path in (self._saved.planner_data or {}).values():
            if path[0] == WINDOWS and str(path[1]).rpartition("/")[0] == name:
                found.setdefault(int(path[1].rpartition("/")[2]), []).append(path[2])
        return [
            self._read(f"{WINDOWS}.{name}/{rank}", sorted(keys), failed=failed) for rank, keys in sorted(found.items())
        ]

    def _read(self, part: str, names: Iterable[str], failed: str) -> dict[str, Tensor]:
        values = {name: room(self._saved.state_dict_metadata.get(f"{part}.{name}"), _empty) for name in names}
        whole = {f"{part}.{name}": value for name, value in values.items()}
        on_all_ranks(lambda: fill_alone(self._folder, self._saved, whole, self._weights_only), failed, dist.group.WORLD)
        return {name: whole[f"{part}.{name}"] for name in values}


def _empty(size: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype)
