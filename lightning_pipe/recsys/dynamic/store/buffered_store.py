"""Rows of the tables of a store, as the caches above read and write them.

    RowCache      slots on the device that is trained on
    HostRows      records in host memory (optional)
    TableStore   a table of the store, on disk

Each level writes to the next, so that a row is on disk at the latest when the cache is flushed. For a commit in the
background, the changes of all levels are copied, writes to the store are held back in memory, and
:meth:`TableStore.write_changes` writes the copies. The store then has the rows of one step, while rows of later steps
are evicted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from lightning_pipe.recsys.dynamic.store.row_store import Keys, Records, RowStore

# Maximum number of records that are written at once while caches read, so that they wait only briefly.
_CHUNK = 4096


@dataclass(frozen=True)
class Change:
    """Changes of a table that the store lacks: records to write [keys, width], and keys to erase."""

    keys: Keys
    records: Records
    erased_keys: Keys


class SharedStore:
    """Store that several tables share, whose writes can be held back in memory."""

    def __init__(self, base: RowStore) -> None:
        self.base = base
        self.lock = threading.Lock()
        # Records that were written, or None for erased ones, while writes are held back.
        self.pending_writes: dict[str, dict[int, bytes | None]] = {}
        self.is_buffering = False

    def buffer_writes(self) -> None:
        """Keep further writes in memory until ``flush_writes``. Reads see them, scans and ``write_changes`` do not."""
        self.flush_writes()
        self.is_buffering = True

    def flush_writes(self) -> None:
        """Pass pending writes on to the store. If it fails, they remain in memory, where reads see them."""
        while self.is_buffering:
            with self.lock:
                self._flush_chunk()
                self.is_buffering = any(self.pending_writes.values())

    def discard_writes(self) -> None:
        """Forget pending writes."""
        with self.lock:
            self.pending_writes.clear()
            self.is_buffering = False

    def snapshot(self) -> dict[str, dict[int, bytes | None]]:
        """Copy of the pending writes."""
        with self.lock:
            return {table: dict(writes) for table, writes in self.pending_writes.items()}

    def restore(self, snapshot: dict[str, dict[int, bytes | None]]) -> None:
        """Replace the pending writes by a copy of those of a snapshot."""
        with self.lock:
            self.pending_writes = {table: dict(writes) for table, writes in snapshot.items()}

    def _flush_chunk(self) -> None:
        for table, writes in self.pending_writes.items():
            batch = dict(islice(writes.items(), _CHUNK))
            records = {key: record for key, record in batch.items() if record is not None}
            if records:
                joined = np.frombuffer(b"".join(records.values()), np.uint8).reshape(len(records), -1)
                self.base.write(table, np.array(list(records), np.int64), joined)
            if erased := [key for key in batch if key not in records]:
                self.base.erase(table, np.array(erased, np.int64))
            for key in batch:
                del writes[key]


class TableStore:
    """Rows of one table that the cache above does not have. Keys are distinct in each call. Safe for threads."""

    def __init__(self, shared: SharedStore, table: str) -> None:
        self._shared, self._table = shared, table

    def read(self, keys: Keys) -> tuple[Records, npt.NDArray[np.bool_]]:
        """Records [keys, width], undefined for missing keys; and a mask of the keys that were found."""
        shared = self._shared
        with shared.lock:
            records, present = shared.base.read(self._table, keys)
            if pending := shared.pending_writes.get(self._table):
                places = [(place, pending[key]) for place, key in enumerate(keys.tolist()) if key in pending]
                if places and not records.flags.writeable:
                    records = records.copy()
                for place, record in places:
                    present[place] = record is not None
                    if record is not None:
                        records[place] = np.frombuffer(record, np.uint8)
            return records, present

    def write(self, keys: Keys, records: Records) -> None:
        """Write records."""
        shared = self._shared
        with shared.lock:
            if shared.is_buffering:
                pending = shared.pending_writes.setdefault(self._table, {})
                pending.update(zip(keys.tolist(), (record.tobytes() for record in records), strict=True))
            else:
                shared.base.write(self._table, keys, records)

    def erase(self, keys: Keys) -> None:
        """Erase records. Missing keys are ignored."""
        shared = self._shared
        with shared.lock:
            if shared.is_buffering:
                shared.pending_writes.setdefault(self._table, {}).update(dict.fromkeys(keys.tolist()))
            else:
                shared.base.erase(self._table, keys)

    def scan(self, chunk: int) -> Iterator[tuple[Keys, Records]]:
        """Yield all records; see :meth:`~lightning_pipe.recsys.dynamic.store.row_store.RowStore.scan`."""
        with self._shared.lock:
            return self._shared.base.scan(self._table, chunk)

    def copy_changes(self, above: Keys) -> Iterator[Change]:
        """Copy what the store lacks, in chunks, except *above*, whose newer records the caller writes itself."""
        return iter(())

    def write_changes(self, change: Change) -> None:
        """Write a change to the store, even while other writes to it are held back."""
        shared = self._shared
        for first in range(0, len(change.keys), _CHUNK):
            part = slice(first, first + _CHUNK)
            with shared.lock:
                shared.base.write(self._table, change.keys[part], change.records[part])
        if change.erased_keys.size:
            with shared.lock:
                shared.base.erase(self._table, change.erased_keys)

    def mark_stored(self) -> None:
        """Record that the store has all changes that ``changes`` yielded last."""

    def flush(self) -> None:
        """Write all records of this level down, so that ``clear`` loses none."""

    def clear_host_memory(self) -> None:
        """Drop records that are not on disk, because the store's contents were replaced."""
