"""Levels of a table's rows below a cache: the store, and whatever is between the two.

    RowCache      slots on the device that is trained on
    HostRows      records in host memory (optional)
    StoredTable   a table of the store, on disk

A level returns the last record that was written to it. Each level writes to the next, so that a row is on disk at the
latest when the cache is flushed. For a commit in the background, the changes of all levels are copied, writes to the
store are held back in memory, and :meth:`RowLevel.keep` writes the copies. The store then has the rows of one step,
while rows of later steps are evicted.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
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
    """Changes of a table that the store lacks.

    Attributes:
        keys: rows to write.
        records: their records, [keys, width].
        gone: rows to erase.
    """

    keys: Keys
    records: Records
    gone: Keys


class RowLevel(ABC):
    """Rows of one table that the cache above does not have. Keys are distinct in each call. Safe for threads."""

    @abstractmethod
    def read(self, keys: Keys) -> tuple[Records, npt.NDArray[np.bool_]]:
        """Records [keys, width], undefined for missing keys; and a mask of the keys that were found."""

    @abstractmethod
    def write(self, keys: Keys, records: Records) -> None:
        """Write records."""

    @abstractmethod
    def erase(self, keys: Keys) -> None:
        """Erase records. Missing keys are ignored."""

    @abstractmethod
    def scan(self, chunk: int) -> Iterator[tuple[Keys, Records]]:
        """Yield all records; see :meth:`~lightning_pipe.recsys.dynamic.store.row_store.RowStore.scan`."""

    @abstractmethod
    def changes(self, above: Keys) -> Iterator[Change]:
        """Copy what the store lacks, in chunks, except *above*, whose newer records the caller passes to ``keep``."""

    @abstractmethod
    def keep(self, change: Change) -> None:
        """Write a change to the store, even while other writes to it are held back."""

    @abstractmethod
    def kept(self) -> None:
        """Record that the store has all changes that ``changes`` yielded last."""

    @abstractmethod
    def flush(self) -> None:
        """Write all records of this level down, so that ``clear`` loses none."""

    @abstractmethod
    def clear(self) -> None:
        """Drop records that are not on disk, because the store's contents were replaced."""


class SharedStore:
    """Store that the caches of several tables share."""

    def __init__(self, base: RowStore) -> None:
        self.base = base
        self._lock = threading.Lock()
        # Records that were written, or None for erased ones, while writes are held back.
        self._held: dict[str, dict[int, bytes | None]] = {}
        self._holds = False

    def hold(self) -> None:
        """Keep all further writes in memory until ``release``. Reads see them, scans and ``keep`` do not."""
        self.release()
        self._holds = True

    def release(self) -> None:
        """Pass held writes on to the store. If it fails, they remain in memory, where reads see them."""
        while self._holds:
            with self._lock:
                self._pass_some_on()
                self._holds = any(self._held.values())

    def drop(self) -> None:
        """Forget held writes."""
        with self._lock:
            self._held.clear()
            self._holds = False

    def snapshot(self) -> dict[str, dict[int, bytes | None]]:
        """Copy of the held writes."""
        with self._lock:
            return {table: dict(held) for table, held in self._held.items()}

    def restore(self, held: dict[str, dict[int, bytes | None]]) -> None:
        """Replace the held writes by a copy of those of a snapshot."""
        with self._lock:
            self._held = {table: dict(one) for table, one in held.items()}

    def _pass_some_on(self) -> None:
        for table, held in self._held.items():
            some = dict(islice(held.items(), _CHUNK))
            records = {key: record for key, record in some.items() if record is not None}
            if records:
                whole = np.frombuffer(b"".join(records.values()), np.uint8).reshape(len(records), -1)
                self.base.write(table, np.array(list(records), np.int64), whole)
            if gone := [key for key in some if key not in records]:
                self.base.erase(table, np.array(gone, np.int64))
            for key in some:
                del held[key]

    def read(self, table: str, keys: Keys) -> tuple[Records, npt.NDArray[np.bool_]]:
        with self._lock:
            records, found = self.base.read(table, keys)
            if held := self._held.get(table):
                places = [(place, held[key]) for place, key in enumerate(keys.tolist()) if key in held]
                if places and not records.flags.writeable:
                    records = records.copy()
                for place, record in places:
                    found[place] = record is not None
                    if record is not None:
                        records[place] = np.frombuffer(record, np.uint8)
            return records, found

    def write(self, table: str, keys: Keys, records: Records) -> None:
        with self._lock:
            if self._holds:
                self._held.setdefault(table, {}).update(
                    zip(keys.tolist(), (record.tobytes() for record in records), strict=True)
                )
            else:
                self.base.write(table, keys, records)

    def erase(self, table: str, keys: Keys) -> None:
        with self._lock:
            if self._holds:
                self._held.setdefault(table, {}).update(dict.fromkeys(keys.tolist()))
            else:
                self.base.erase(table, keys)

    def keep(self, table: str, change: Change) -> None:
        """Write a change to the store, even while other writes are held back."""
        for first in range(0, len(change.keys), _CHUNK):
            part = slice(first, first + _CHUNK)
            with self._lock:
                self.base.write(table, change.keys[part], change.records[part])
        if change.gone.size:
            with self._lock:
                self.base.erase(table, change.gone)

    def scan(self, table: str, chunk: int) -> Iterator[tuple[Keys, Records]]:
        """Scan the store, taking the lock for each chunk."""
        with self._lock:
            scan = self.base.scan(table, chunk)
        while True:
            with self._lock:
                found = next(scan, None)
            if found is None:
                return
            yield found


class StoredTable(RowLevel):
    """Lowest level: one table of a store."""

    def __init__(self, shared: SharedStore, table: str) -> None:
        self._shared, self._table = shared, table

    def read(self, keys: Keys) -> tuple[Records, npt.NDArray[np.bool_]]:
        return self._shared.read(self._table, keys)

    def write(self, keys: Keys, records: Records) -> None:
        self._shared.write(self._table, keys, records)

    def erase(self, keys: Keys) -> None:
        self._shared.erase(self._table, keys)

    def scan(self, chunk: int) -> Iterator[tuple[Keys, Records]]:
        return self._shared.scan(self._table, chunk)

    def changes(self, above: Keys) -> Iterator[Change]:
        return iter(())

    def keep(self, change: Change) -> None:
        self._shared.keep(self._table, change)

    def kept(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def clear(self) -> None:
        pass
