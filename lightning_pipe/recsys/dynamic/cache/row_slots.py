"""Slots of a cache: assignment of rows to slots, loading of stored and new rows, and eviction.

Not thread-safe, except for headers and values of pinned rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.recsys.dynamic.cache.eviction import Policy, select_victims
from lightning_pipe.recsys.dynamic.cache.id_map import LAST_TICK, DeviceIdMap, Slots, id_map
from lightning_pipe.recsys.dynamic.cache.initial_values import InitialValues
from lightning_pipe.recsys.dynamic.cache.row_columns import RowColumns
from lightning_pipe.recsys.dynamic.cache.row_headers import HEADER_BYTES, RowHeaders, decode_row_headers
from lightning_pipe.recsys.dynamic.cache.ticket import OpenBatch
from lightning_pipe.recsys.dynamic.store.buffered_store import Change, TableStore
from lightning_pipe.recsys.dynamic.store.row_store import Keys, Records

# Each eviction frees at least 1 / _EVICTED of the capacity, because choosing rows costs time for every slot.
_EVICTED = 16
# Maximum number of rows that are copied and written at once.
_CHUNK = 65536


@dataclass
class CacheStats:
    """Statistics of a cache since its creation.

    Attributes:
        ids: number of prefetched ids.
        hits: number of prefetched ids whose row was cached.
        read: number of rows read from the store.
        created: number of new rows, whose ids the store did not have.
        evicted: number of rows evicted to make room for others.
        written: number of rows written to the store.
        expired: number of rows restarted or erased because they were not seen for more than ``ttl`` steps.
        held_back: number of rows looked up for training but not admitted, summed over batches.
    """

    ids: int = 0
    hits: int = 0
    read: int = 0
    created: int = 0
    evicted: int = 0
    written: int = 0
    expired: int = 0
    held_back: int = 0


@dataclass
class RepeatedBatchTrainingState:
    """Repeated training of the same batches, as a profile does it, over a cache whose state is restored afterwards.

    Rows that its batches have brought leave the cache when a later batch is prefetched, so that a batch that is trained
    again reads its rows from below, as batches of new data do. A batch that was trained recently has more of its rows
    in the cache than it had then. Therefore those of its rows that have occurred in the fewest batches leave the cache
    before its prefetch, until as large a share of its ids is missing as in the prefetches so far.

    Attributes:
        suspended: open batches of the suspended training.
        missing: share of the ids of earlier prefetches whose rows were not cached.
        brought: mask of the slots whose rows repeated training has brought.
    """

    suspended: list[OpenBatch]
    missing: float
    brought: npt.NDArray[np.bool_]


class RowSlots:
    """Slots of one table's columns, with the map of ids to slots and the headers."""

    def __init__(
        self,
        table: str,
        columns: RowColumns,
        headers: RowHeaders,
        below: TableStore,
        initial: InitialValues,
        policy: Policy,
        check_nan: bool,
        ids_of: Callable[[Keys], Keys] | None = None,
        ids: DeviceIdMap | None = None,
    ) -> None:
        self._table, self._columns, self.headers = table, columns, headers
        self._below = below
        self._initial, self._policy, self._check_nan = initial, policy, check_nan
        self._ids_of = ids_of
        self.map = id_map(columns.capacity) if ids is None else ids
        self.stats = CacheStats()
        self._tick = 0
        # Rows whose restart failed and is repeated later.
        self._owed: list[Slots] = []
        # Stack of free slots, initially with the lowest on top.
        self._free = np.arange(columns.capacity)[::-1].copy()
        self._free_count = columns.capacity

    def touch(self, keys: Keys) -> tuple[Slots, Slots, Slots]:
        """Same as ``IdMap.touch``, with the tick of a new batch and statistics."""
        slots, rows, missing = self.map.touch(keys, self._next_tick(len(keys)))
        self.stats.hits -= len(missing)
        return slots, rows, missing

    def record_slot_use(self, ids: DeviceIdMap, summary: Tensor) -> tuple[Slots, Keys]:
        """Same as ``DeviceIdMap.record_slot_use``, with the tick of a new batch and statistics."""
        rows, missing = ids.record_slot_use(summary, self._next_tick(len(summary) - 2))
        self.stats.hits -= len(missing)
        return rows, missing

    def _next_tick(self, number: int) -> int:
        """Tick of a new batch; its ids count as hits."""
        if self._tick == LAST_TICK:
            self.map.reset_ticks()
            self._tick = 0
        self._tick += 1
        self.stats.ids += number
        self.stats.hits += number
        return self._tick

    def load_rows(self, keys: Keys, pinned: Callable[[], tuple[npt.NDArray[np.bool_], int]]) -> tuple[Slots, Slots]:
        """Load or create the rows of *keys*, which are not in the map and may repeat."""
        keys, places = np.unique(keys, return_inverse=True)
        if len(keys) > self._free_count:
            self._evict(len(keys), *pinned())
        records, present = self._below.read(keys)
        # Free slots are never read and never dirty, so an error before the insertion into the map changes nothing.
        rows = self._free[self._free_count - len(keys) : self._free_count][::-1].copy()
        loaded, unseen = rows[present], ~present
        if unseen.any():
            self._columns.initialize(rows[unseen], self._initial(keys[unseen]))
            self.headers.values[rows[unseen]] = 0
        if loaded.size:
            if loaded.size < len(keys):
                records = records[present]
            self._columns.write(loaded, records[:, HEADER_BYTES:])
            self.headers.values[loaded] = decode_row_headers(records)
        self.map.insert(keys, rows, self._tick)
        self._free_count -= len(keys)
        self.stats.read += len(loaded)
        self.stats.created += len(keys) - len(loaded)
        return rows[places], rows

    def _evict(self, needed: int, pinned: npt.NDArray[np.bool_], in_flight: int) -> None:
        """Evict rows until at least *needed* slots are free."""
        capacity, in_use = len(pinned), int(np.count_nonzero(pinned))
        if needed > capacity - in_use:
            raise InputError(
                f"table {self._table!r}: this batch and {in_flight} others in flight use {in_use + needed} rows at the"
                f" same time, {needed} of them not cached yet, but the cache has {capacity} slots. Give the table at"
                f" least {in_use + needed} cache rows, or use smaller batches or a plan with fewer batches in flight"
            )
        pinned[self._free[: self._free_count]] = True
        candidates = np.flatnonzero(~pinned)
        number = min(len(candidates), max(needed - self._free_count, capacity // _EVICTED))
        chosen = select_victims(
            self._policy,
            number,
            self.map.ticks()[candidates],
            lambda: (self.map.keys_of(candidates), *self.headers.values[candidates].T),
        )
        self.evict(candidates[chosen])

    def evict_before_repeated_prefetch(
        self, repeated_training: RepeatedBatchTrainingState, keys: Keys, pinned: npt.NDArray[np.bool_]
    ) -> None:
        """Evict rows before a prefetch of *keys* in repeated training, see :class:`RepeatedBatchTrainingState`."""
        brought = np.flatnonzero(repeated_training.brought & self.get_used_slot_mask() & ~pinned)
        repeated_training.brought[brought] = False
        self.evict(brought)
        _, rows, missing = self.touch(keys)
        surplus = max(0, round(repeated_training.missing * len(keys)) - len(missing))
        rows = rows[~pinned[rows]]
        self.evict(rows[np.argsort(self.headers.counts[rows], kind="stable")[:surplus]])

    def evict(self, rows: Slots) -> None:
        """Free the slots of *rows*, after writing those that are dirty to the level below."""
        self.write_back(rows[self.headers.dirty[rows] != 0])
        self.map.remove(rows)
        self._free[self._free_count : self._free_count + len(rows)] = rows
        self._free_count += len(rows)
        self.stats.evicted += len(rows)

    def get_used_slot_mask(self) -> npt.NDArray[np.bool_]:
        """Mask of the slots that have a row."""
        used = np.ones(len(self._free), bool)
        used[self._free[: self._free_count]] = False
        return used

    def snapshot(self) -> tuple[Any, ...]:
        """Copy of the slots, with the rows in them. The order of last uses is not included; results do not need it."""
        used = np.flatnonzero(self.get_used_slot_mask())
        slots = used, self.map.keys_of(used), self._free.copy(), self._free_count, replace(self.stats)
        return *slots, self._columns.snapshot(), self.headers.values.copy(), self.headers.dirty.copy()

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Restore a snapshot."""
        used, keys, free, self._free_count, stats, columns, headers, dirty = snapshot
        self._owed.clear()
        self.map.clear()
        self.map.insert(keys, used)
        self._free[:] = free
        self.stats = replace(stats)
        self._columns.restore(columns)
        self.headers.values[:], self.headers.dirty[:] = headers, dirty

    def write_back(self, rows: Slots) -> None:
        """Write dirty *rows* to the level below, and erase those with count 0 from it."""
        for change in self.copy_changes(rows):
            self.refuse_nan(change.keys, change.records)
            if change.keys.size:
                self._below.write(change.keys, change.records)
            if change.erased_keys.size:
                self._below.erase(change.erased_keys)
        self.headers.dirty[rows] = 0

    def copy_changes(self, rows: Slots) -> Iterator[Change]:
        """Copy dirty *rows*, in chunks."""
        for first in range(0, len(rows), _CHUNK):
            part = rows[first : first + _CHUNK]
            exists = self.headers.counts[part] > 0
            existing = part[exists]
            self.stats.written += len(existing)
            yield Change(self.map.keys_of(existing), self._read_records(existing), self.map.keys_of(part[~exists]))

    def initialize_rows(self, rows: Slots) -> None:
        """Set *rows* to their initial values and states."""
        if rows.size:
            self._columns.initialize(rows, self._initial(self.map.keys_of(rows)))

    def initialize_or_retry_later(self, rows: Slots) -> None:
        """Same as ``initialize``, but a failure, as of a user's function, is left to ``retry_initialization``.

        A user's function of initial values may fail. For code that runs on one rank without the others, where an error
        must not be raised.
        """
        try:
            self.initialize_rows(rows)
        except Exception:
            self._owed.append(rows)

    def retry_initialization(self) -> None:
        """Repeat failed restarts of rows. Raises the error again at every call, until the restart succeeds.

        Must be called before rows are read, counted or written to the store.
        """
        while self._owed:
            self.initialize_rows(self._owed[-1])
            self._owed.pop()

    def reset_rows(self, rows: Slots) -> None:
        """Turn existing *rows* into nonexistent ones, which have count 0 and initial values."""
        self.initialize_rows(rows)
        self.headers.values[rows] = 0
        self.headers.dirty[rows] = 1
        self.stats.expired += len(rows)

    def clear(self) -> None:
        """Free all slots without writing."""
        self._owed.clear()
        self.map.clear()
        self.headers.values[:] = 0
        self.headers.dirty[:] = 0
        self._free = np.arange(len(self._free))[::-1].copy()
        self._free_count = len(self._free)

    def _read_records(self, rows: Slots) -> Records:
        if not rows.size:
            return np.empty((0, HEADER_BYTES + self._columns.width), np.uint8)
        headers = torch.from_numpy(self.headers.values[rows]).view(torch.uint8)
        records: Records = torch.cat([headers, self._columns.read(rows)], dim=1).numpy()
        return records

    def refuse_nan(self, keys: Keys, records: Records) -> None:
        """Raise InputError if ``check_nan`` is set and records contain NaN."""
        if not self._check_nan or not keys.size:
            return
        keys = keys[self._columns.get_nan_record_mask(records[:, HEADER_BYTES:])]
        if keys.size:
            first = keys[:10] if self._ids_of is None else self._ids_of(keys[:10])
            shown = ", ".join(map(str, first.tolist()))
            raise InputError(
                f"table {self._table!r}: {keys.size} row(s) contain NaN, with ids {shown}"
                f"{', ...' if keys.size > 10 else ''}; they were not stored. Resume from a checkpoint with a lower"
                " learning rate or gradient clipping"
            )
