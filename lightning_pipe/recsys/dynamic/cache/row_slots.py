"""The slots of a cache: which row each holds, how rows come into them from the store or as new ones, and leave again.

One thread at a time, but for headers and values of rows that somebody has pinned.

Tested in ``tests/scenarios/recommenders/test_row_cache_equality.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.recsys.dynamic.cache.eviction import Policy, victims
from lightning_pipe.recsys.dynamic.cache.id_map import LAST_TICK, IdMap, Slots, distinct
from lightning_pipe.recsys.dynamic.cache.initial_values import InitialValues
from lightning_pipe.recsys.dynamic.cache.row_columns import RowColumns
from lightning_pipe.recsys.dynamic.cache.row_headers import BYTES, RowHeaders
from lightning_pipe.recsys.dynamic.store.row_store import Keys, Records, RowStore

__all__ = ["CacheStats", "RowSlots", "headers_of"]

# Of the capacity: so many rows leave at once, since to find them costs time for every slot.
_EVICTED = 16
# Rows that are handed to the store at once.
_CHUNK = 65536


@dataclass
class CacheStats:
    """What a cache has done since it was made.

    Attributes:
        ids: ids that were prefetched.
        hits: of these, ids whose row was cached.
        read: rows that came from the store.
        new: rows of ids that the store did not have.
        evicted: rows that left for others.
        written: rows handed to the store.
        expired: rows that started anew, or were erased, since nobody had seen them for longer than ``ttl``.
        held_back: rows that were looked up for training and were not admitted.
    """

    ids: int = 0
    hits: int = 0
    read: int = 0
    new: int = 0
    evicted: int = 0
    written: int = 0
    expired: int = 0
    held_back: int = 0


class RowSlots:
    """The slots of one table's columns.

    Args:
        table, store, store_lock, initial, policy, check_nan: see
            :class:`~lightning_pipe.recsys.dynamic.cache.row_cache.RowCache`.
        columns: the table's.
        headers: of as many slots.

    Attributes:
        headers: as given.
        map: slots of ids.
        stats: what happened so far.
    """

    def __init__(
        self,
        table: str,
        columns: RowColumns,
        headers: RowHeaders,
        store: RowStore,
        store_lock: threading.Lock,
        initial: InitialValues,
        policy: Policy,
        check_nan: bool,
        ids_of: Callable[[Keys], Keys] | None = None,
    ) -> None:
        self._table, self._columns, self.headers = table, columns, headers
        self._store, self._store_lock = store, store_lock
        self._initial, self._policy, self._check_nan = initial, policy, check_nan
        self._ids_of = ids_of
        self.map = IdMap(columns.capacity)
        self.stats = CacheStats()
        self._tick = 0
        # Rows that are to start anew, and could not.
        self._owed: list[Slots] = []
        # A stack of free slots, the lowest on top.
        self._free = np.arange(columns.capacity)[::-1].copy()
        self._free_count = columns.capacity

    def touch(self, keys: Keys) -> tuple[Slots, Slots, Slots]:
        """As ``IdMap.touch``, for a batch: slots, the distinct ones of these, and the indices of ids that have none."""
        if self._tick == LAST_TICK:
            self.map.reset_ticks()
            self._tick = 0
        self._tick += 1
        slots, rows, missing = self.map.touch(keys, self._tick)
        self.stats.ids += len(keys)
        self.stats.hits += len(keys) - len(missing)
        return slots, rows, missing

    def bring(self, keys: Keys, pinned: Callable[[], tuple[npt.NDArray[np.bool_], int]]) -> tuple[Slots, Slots]:
        """Give ids without a row their rows: from the store, or new ones.

        Args:
            keys: ids that are not in the map; they may repeat.
            pinned: tells which slots must stay, and in how many batches in flight.

        Returns:
            a slot for each of *keys*, and the distinct ones of these.
        """
        keys, places = distinct(keys)
        if len(keys) > self._free_count:
            self._evict(len(keys), *pinned())
        with self._store_lock:
            records, found = self._store.read(self._table, keys)
        # Nobody looks at free slots, none of which is dirty: until they are handed out, an error changes nothing.
        rows = self._free[self._free_count - len(keys) : self._free_count][::-1].copy()
        known, unseen = rows[found], ~found
        if unseen.any():
            self._columns.start(rows[unseen], self._initial(keys[unseen]))
            self.headers.clear(rows[unseen])
        if known.size:
            if known.size < len(keys):
                records = records[found]
            self._columns.write(known, records[:, BYTES:])
            self.headers.write(known, headers_of(records))
        self.map.insert(keys, rows, self._tick)
        self._free_count -= len(keys)
        self.stats.read += len(known)
        self.stats.new += len(keys) - len(known)
        return rows[places], rows

    def _evict(self, wanted: int, pinned: npt.NDArray[np.bool_], in_flight: int) -> None:
        """Have *wanted* slots free."""
        capacity, in_use = len(pinned), int(np.count_nonzero(pinned))
        if wanted > capacity - in_use:
            raise InputError(
                f"table {self._table!r}: this batch and the {in_flight} in flight beside it use {in_use + wanted} rows"
                f" at once, of which {wanted} are not cached yet; the cache has {capacity} slots: give the table a"
                f" cache of at least {in_use + wanted} rows, or take smaller batches or a plan that has fewer in flight"
            )
        pinned[self._free[: self._free_count]] = True
        candidates = np.flatnonzero(~pinned)
        number = min(len(candidates), max(wanted - self._free_count, capacity // _EVICTED))
        chosen = victims(
            self._policy,
            number,
            self.map.ticks()[candidates],
            lambda: (self.map.keys_of(candidates), *self.headers.read(candidates).T),
        )
        rows = candidates[chosen]
        self.write_back(rows[self.headers.dirty[rows] != 0])
        self.map.remove(rows)
        self._free[self._free_count : self._free_count + len(rows)] = rows
        self._free_count += len(rows)
        self.stats.evicted += len(rows)

    def dirty(self) -> Slots:
        """Rows that the store does not have as they are."""
        return np.flatnonzero(self.headers.dirty)

    def expired(self, step: int) -> Slots:
        """Rows that were last seen too long before *step*."""
        used = np.ones(len(self._free), bool)
        used[self._free[: self._free_count]] = False
        return self.headers.expired(np.flatnonzero(used), step)

    def write_back(self, rows: Slots) -> None:
        """Make the store have dirty *rows* as they are, and forget those that are not there.

        Raises:
            InputError: of ``check_nan``.
        """
        for first in range(0, len(rows), _CHUNK):
            part = rows[first : first + _CHUNK]
            there = self.headers.counts[part] > 0
            kept, gone = part[there], self.map.keys_of(part[~there])
            keys = self.map.keys_of(kept)
            if kept.size:
                if self._check_nan:
                    self._refuse_nan(keys[self._columns.with_nan(kept)])
                records = self._records(kept)
                with self._store_lock:
                    self._store.write(self._table, keys, records)
            if gone.size:
                with self._store_lock:
                    self._store.erase(self._table, gone)
            self.headers.dirty[part] = 0
            self.stats.written += len(kept)

    def start(self, rows: Slots) -> None:
        """Give rows their initial values and states."""
        if rows.size:
            self._columns.start(rows, self._initial(self.map.keys_of(rows)))

    def start_or_owe(self, rows: Slots) -> None:
        """As ``start``, which ``settle`` makes up for where it fails: for callers on one rank, whom no other waits for.

        A user's function of initial values may fail at any call.
        """
        try:
            self.start(rows)
        except Exception:
            self._owed.append(rows)

    def settle(self) -> None:
        """Start what is owed; what goes wrong is raised, again and again, until it does not.

        Whoever reads rows, counts them or hands them to the store calls this first.
        """
        while self._owed:
            self.start(self._owed[-1])
            self._owed.pop()

    def forget(self, rows: Slots) -> None:
        """Rows that are there, and are not from now on."""
        self.start(rows)
        self.headers.clear(rows)
        self.headers.dirty[rows] = 1
        self.stats.expired += len(rows)

    def clear(self) -> None:
        """All slots are free, and nothing is written."""
        self._owed.clear()
        self.map.clear()
        self.headers.clear(np.arange(len(self._free)))
        self.headers.dirty[:] = 0
        self._free = np.arange(len(self._free))[::-1].copy()
        self._free_count = len(self._free)

    def _records(self, rows: Slots) -> Records:
        headers = torch.from_numpy(self.headers.read(rows)).view(torch.uint8)
        records: Records = torch.cat([headers, self._columns.read(rows)], dim=1).numpy()
        return records

    def _refuse_nan(self, keys: Keys) -> None:
        if keys.size:
            first = keys[:10] if self._ids_of is None else self._ids_of(keys[:10])
            shown = ", ".join(map(str, first.tolist()))
            raise InputError(
                f"table {self._table!r}: {keys.size} rows have NaN, those of ids {shown}"
                f"{', ...' if keys.size > 10 else ''}; needed are numbers, and none of these rows has been stored: go"
                " back to a checkpoint, with a lower learning rate or clipped gradients"
            )


def headers_of(records: Records) -> npt.NDArray[np.int64]:
    """Count and last step of each record: records x 2."""
    return np.array(records[:, :BYTES], order="C").view(np.int64)
