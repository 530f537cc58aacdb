"""Bounded cache of rows over a store on disk, as a whole: what is written, scanned, copied and restored.

``row_batches`` has the operations of each batch, and describes threads and locks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.recsys.dynamic.cache.id_map import Slots
from lightning_pipe.recsys.dynamic.cache.rehearsal import Rehearsal
from lightning_pipe.recsys.dynamic.cache.row_batches import RowBatches
from lightning_pipe.recsys.dynamic.cache.row_headers import BYTES, COPIED, headers_of
from lightning_pipe.recsys.dynamic.store.row_files import StoredRows
from lightning_pipe.recsys.dynamic.store.row_levels import Change
from lightning_pipe.recsys.dynamic.store.row_store import Keys, Records


class RowCache(RowBatches):
    """One rank's part of a table. For the arguments, see :class:`RowBatches`."""

    # Called on the main thread between batches; prefetches may run at the same time.

    def flush(self) -> None:
        """Write every changed row to the store, as of the last trained batch. Rows stay cached.

        Rows of a batch that has begun but not run its backward are written as if it had not begun.
        """
        with self.moving, self._lock:
            for change in self._changes():
                self.keep(change)
            self._kept()

    def copy_changes(self) -> list[Change]:
        """Copy every changed row, as ``flush`` would write it, for :meth:`keep`. Takes as much memory as the rows."""
        with self.moving, self._lock:
            return list(self._changes())

    def keep(self, change: Change) -> None:
        """Write a change to the store. May be called on any thread."""
        self._slots.refuse_nan(change.keys, change.records)
        self._below.keep(change)

    def kept(self) -> None:
        """Record that the store has all of the last :meth:`copy_changes`. May be called on any thread."""
        with self.moving, self._lock:
            self._kept()

    def _kept(self) -> None:
        self._headers.dirty[self._headers.dirty == COPIED] = 0
        self._below.kept()

    def _changes(self) -> Iterator[Change]:
        self._bring_up_to_date()
        # Undo from the last batch to the first, then restore in the opposite order.
        begun: list[tuple[Slots, npt.NDArray[np.int64]]] = []
        for batch, noted in reversed(self._open.begun()):
            begun.append((batch.rows, self._headers.read(batch.rows)))
            self._headers.undo(batch.rows, noted)
        try:
            dirty = self._slots.dirty()
            self._headers.dirty[dirty] = COPIED
            yield from self._below.changes(self._slots.map.keys_of(dirty))
            yield from self._slots.changes(dirty)
        finally:
            for rows, headers in reversed(begun):
                self._headers.write(rows, headers)
                self._headers.dirty[rows] = 1

    def forget(self) -> None:
        """Empty the cache without writing, because the store's contents were replaced. Ends all tickets."""
        with self.moving, self._lock:
            self._version += 1
            self._step = None
            self._open.end_all()
            self._slots.clear()
            self._below.clear()

    def rehearse(self, rehearses: bool) -> None:
        """Begin or end a :class:`~lightning_pipe.recsys.dynamic.cache.rehearsal.Rehearsal`."""
        with self.moving, self._lock:
            if rehearses:
                self._below.flush()  # what is written from now on is dropped at the end
            missing = 1 - self.stats.hits / max(1, self.stats.ids)
            self._rehearsal = Rehearsal(self.capacity, self._open.all(), missing) if rehearses else None

    def cool(self, keys: Tensor) -> None:
        """Evict rows before a prefetch of *keys*, if the cache is in a rehearsal."""
        with self.moving:
            if self._rehearsal is not None:
                self._slots.cool(self._rehearsal, keys.detach().cpu().numpy(), self._pinned()[0])

    def snapshot(self) -> tuple[Any, ...]:
        """Copy of all cached rows in host memory, and of the state of the cache."""
        with self.moving, self._lock:
            self._bring_up_to_date()
            self._below.flush()
            return self._open.all(), self._step, self._slots.snapshot()

    def restore(self, kept: tuple[Any, ...]) -> None:
        """Restore a snapshot. Ends batches that were opened after it."""
        with self.moving, self._lock:
            self._version += 1
            opened, self._step, slots = kept
            self._open.end_all(but=opened)
            self._slots.restore(slots)
            self._below.clear()
            if self._rehearsal is not None:
                self._rehearsal.forget()

    def purge(self, step: int) -> int:
        """Erase rows last seen more than ``ttl`` steps before *step*. Scans the whole store."""
        if self._headers.ttl is None:
            return 0
        with self.moving:
            with self._lock:
                self._bring_up_to_date()
                self._version += 1
                cached = self._slots.expired(step)
                self._slots.forget(cached)
                self._slots.write_back(cached)
            stored: list[Keys] = []
            for keys, records in self._below.scan(65536):
                ended = keys[self._headers.expired_headers(headers_of(records), step)]
                # The header of a cached row is newer than the one in the store.
                stored.append(ended[self._slots.map.find(ended) < 0])
            for keys in filter(len, stored):
                self._below.erase(keys)
            self._slots.stats.expired += (number := sum(map(len, stored)))
            return number + len(cached)

    def rows(self, *, since: int = 0, chunk: int = 65536) -> Iterator[StoredRows]:
        """Flush, and iterate over all rows, cached or not, in the store's order."""
        self.flush()
        return self._scanned(self._below.scan(chunk), self._version, since)

    def _scanned(self, scan: Iterator[tuple[Keys, Records]], version: int, since: int) -> Iterator[StoredRows]:
        while True:
            with self.moving:
                if self._version != version:
                    raise PlanError(
                        f"table {self.table!r} has changed while its rows were scanned. Finish the scan before the next"
                        " batch begins"
                    )
                found = next(scan, None)
            if found is None:
                return
            keys, records = found
            chosen = headers_of(records)[:, 1] >= since
            if chosen.any():
                yield self.decode(keys[chosen], records[chosen])

    def decode(self, keys: Keys, records: Records) -> StoredRows:
        """Rows of a chunk of records."""
        counts, last_seen = (torch.tensor(part) for part in headers_of(records).T)
        return StoredRows(torch.from_numpy(keys), counts, last_seen, self._columns.typed(records[:, BYTES:]))
