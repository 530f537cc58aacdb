"""Records in host memory, between a cache on a GPU and the store on disk."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lightning_pipe.recsys.dynamic.cache.id_map import LAST_TICK, Slots, id_map
from lightning_pipe.recsys.dynamic.cache.row_headers import COPIED
from lightning_pipe.recsys.dynamic.store.buffered_store import Change, SharedStore, TableStore
from lightning_pipe.recsys.dynamic.store.row_store import Keys, Records

# Each eviction frees at least 1 / _EVICTED of the capacity, because choosing records costs time for every slot.
_EVICTED = 16
# Maximum number of records that are copied and written at once.
_CHUNK = 65536


class HostRows(TableStore):
    """Table of a store, with its most recently used records in memory. Others are evicted to the store."""

    def __init__(self, capacity: int, width: int, shared: SharedStore, table: str) -> None:
        super().__init__(shared, table)
        self._map = id_map(capacity)
        self._records = np.empty((capacity, width), np.uint8)
        # 0 if the store has the record, 1 if it does not, and COPIED if the store will have it.
        self._dirty = np.zeros(capacity, np.uint8)
        self._free = np.arange(capacity)
        self._tick = 0
        self._lock = threading.Lock()

    def read(self, keys: Keys) -> tuple[Records, npt.NDArray[np.bool_]]:
        with self._lock:
            slots, missing = self._find_and_touch(keys)
            records, present = self._records[slots], np.ones(len(keys), bool)
            if missing.size:
                records[missing], present[missing] = super().read(keys[missing])
                loaded = missing[present[missing]][: self._map.capacity]
                self._add(keys[loaded], records[loaded], 0)
            return records, present

    def write(self, keys: Keys, records: Records) -> None:
        with self._lock:
            slots, missing = self._find_and_touch(keys)
            cached = slots >= 0
            self._records[slots[cached]] = records[cached]
            self._dirty[slots[cached]] = 1
            added, overflow = np.split(missing, [self._map.capacity])
            if overflow.size:
                super().write(keys[overflow], records[overflow])
            self._add(keys[added], records[added], 1)

    def erase(self, keys: Keys) -> None:
        with self._lock:
            super().erase(keys)
            self._drop(keys)

    def scan(self, chunk: int) -> Iterator[tuple[Keys, Records]]:
        self.flush()
        return super().scan(chunk)

    def copy_changes(self, above: Keys) -> Iterator[Change]:
        """See the base class. The caller makes no other call, except ``write_changes``, before the last change."""
        with self._lock:
            # The caller writes newer records past this level.
            self._drop(above)
            slots = np.flatnonzero(self._dirty)
            self._dirty[slots] = COPIED
        for part in _chunks(slots):
            yield Change(self._map.keys_of(part), self._records[part], erased_keys=np.empty(0, np.int64))

    def mark_stored(self) -> None:
        with self._lock:
            self._dirty[self._dirty == COPIED] = 0

    def flush(self) -> None:
        with self._lock:
            self._write_down(np.flatnonzero(self._dirty))

    def clear_host_memory(self) -> None:
        with self._lock:
            self._map.clear()
            self._dirty[:] = 0
            self._free = np.arange(self._map.capacity)

    def _find_and_touch(self, keys: Keys) -> tuple[Slots, Slots]:
        """Slots of *keys*, -1 for missing ones; and indices of the missing keys."""
        # After the last tick, the order of eviction is wrong for a while.
        self._tick = self._tick % LAST_TICK + 1
        slots, _, missing = self._map.touch(keys, self._tick)
        return slots, missing

    def _add(self, keys: Keys, records: Records, dirty: int) -> None:
        """Add records that are not here, at most the capacity."""
        if len(keys) > len(self._free):
            self._evict(len(keys))
        slots, self._free = np.split(self._free, [len(keys)])
        self._records[slots], self._dirty[slots] = records, dirty
        self._map.insert(keys, slots, self._tick)

    def _evict(self, needed: int) -> None:
        """Evict the least recently used records, until at least *needed* slots are free."""
        used = np.ones(self._map.capacity, bool)
        used[self._free] = False
        slots = np.flatnonzero(used)
        number = min(len(slots), max(needed - len(self._free), self._map.capacity // _EVICTED))
        slots = slots[np.argpartition(self._map.ticks()[slots], number - 1)[:number]]
        self._write_down(slots[self._dirty[slots] != 0])
        self._free_slots(slots)

    def _write_down(self, slots: Slots) -> None:
        """Write dirty records to the store."""
        for part in _chunks(slots):
            super().write(self._map.keys_of(part), self._records[part])
            self._dirty[part] = 0

    def _drop(self, keys: Keys) -> None:
        slots = self._map.find(keys)
        self._free_slots(slots[slots >= 0])

    def _free_slots(self, slots: Slots) -> None:
        self._map.remove(slots)
        self._dirty[slots] = 0
        self._free = np.concatenate([self._free, slots])


def _chunks(slots: Slots) -> Iterator[Slots]:
    return (slots[first : first + _CHUNK] for first in range(0, len(slots), _CHUNK))
