"""Rows of dynamic tables that changed between two checkpoints, as Parquet files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.store.row_files import StoredRows
from lightning_pipe.recsys.serving.table_files import (
    Rows,
    open_checkpoint_dynamic_tables,
    pa,
    pq,
    read_checkpoint,
    write_vectors_to_parquet,
)


def write_row_diff(checkpoint: str | Path, since: str | Path | int, folder: str | Path) -> dict[str, int]:
    """Write the rows of dynamic tables that differ from an older checkpoint, and return the number in each file.

    ``NAME.parquet`` has the rows that are new or have other weights (compared by their bits as float32), as
    :func:`~lightning_pipe.recsys.serving.table_files.write_tables_to_parquet` writes them. ``NAME.removed.parquet`` has
    the ids that only the older checkpoint has. The older rows with both changes are exactly the newer ones, for any two
    checkpoints. Tables are read one after another. Memory is about 40 bytes for each older row, 17 after they are
    sorted, besides a chunk of rows. The older vectors are in a temporary file next to *folder*, mapped into memory.
    """
    target, written = Path(folder), dict[str, int]()
    if os.path.lexists(target):
        raise SetupError(f"expected the path of a new folder, but {str(folder)!r} exists. Give another, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        newer, older = (
            {}
            if isinstance(place, int)
            else stack.enter_context(open_checkpoint_dynamic_tables(*read_checkpoint(place)[:2]))
            for place in (checkpoint, since)
        )
        beside = stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent))
        complete = Path(beside, "complete")
        complete.mkdir()
        for name in sorted({*newer, *older}):
            nothing: Rows = iter(()), (newer.get(name) or older[name])[1]
            (rows, width), (older_rows, older_width) = newer.get(name, nothing), older.get(name, nothing)
            if width != older_width:
                raise SetupError(
                    f"table {name!r} has rows of {width} numbers in {str(checkpoint)!r} and of {older_width} in"
                    f" {str(since)!r}, expected the same number. Export all rows of the newer checkpoint instead"
                )
            with tempfile.TemporaryFile(dir=beside) as file:
                older_table = _OlderCheckpointRows(name, older_rows, width, file)
                changed = _iterate_changed_rows(rows, since if isinstance(since, int) else older_table)
                written[f"{name}.parquet"] = write_vectors_to_parquet(complete, name, width, changed)
            if not isinstance(since, int):
                removed = pa.table({"id": older_table.ids[~older_table.seen]})
                written[f"{name}.removed.parquet"] = len(removed)
                pq.write_table(removed, complete / f"{name}.removed.parquet")
        complete.rename(target)
    return written


class _OlderCheckpointRows:
    """Older rows of a table: sorted ids in memory, vectors in a file, and which ids the newer checkpoint has."""

    def __init__(self, name: str, rows: Iterator[StoredRows], width: int, file: Any) -> None:
        parts = [np.empty(0, np.int64)]
        for chunk in rows:
            parts.append(chunk.ids.numpy())
            file.write(_view_weights_as_uint32(chunk))
        ids = np.concatenate(parts)
        self._places = ids.argsort()
        self.ids, self.seen = ids[self._places], np.zeros(len(ids), np.bool_)
        if (self.ids[1:] == self.ids[:-1]).any():
            raise SetupError(f"the older checkpoint has rows of the same id in table {name!r}. Use another checkpoint")
        self._vectors = np.empty((0, width), np.uint32)
        if len(ids):  # an empty file cannot be mapped
            self._vectors = np.memmap(file, np.uint32, "r", shape=(len(ids), width))

    def find_changed_rows(self, rows: StoredRows) -> Tensor:
        first, last = (np.searchsorted(self.ids, rows.ids.numpy(), side) for side in ("left", "right"))
        matched, changed = np.flatnonzero(first < last), np.ones(len(first), np.bool_)
        self.seen[first[matched]] = True
        changed[matched] = (self._vectors[self._places[first[matched]]] != _view_weights_as_uint32(rows)[matched]).any(
            1
        )
        return torch.from_numpy(changed)


def _iterate_changed_rows(
    rows: Iterator[StoredRows], since: int | _OlderCheckpointRows
) -> Iterator[tuple[Tensor, Tensor]]:
    for chunk in rows:
        changed = chunk.last_seen >= since if isinstance(since, int) else since.find_changed_rows(chunk)
        if changed.any():
            yield chunk.ids[changed], chunk.columns[0][changed]


def _view_weights_as_uint32(rows: StoredRows) -> Any:
    return rows.columns[0].float().numpy().view(np.uint32)
