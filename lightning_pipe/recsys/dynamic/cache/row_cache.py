"""Bounded cache of rows over a store on disk: one rank's part of a table that has a row for every int64 id.

    worker  prefetch(i + 1) ────────── prefetch(i + 2) ─────────      finds, reads, creates and evicts rows: no effect
                                                                      on training results
    main    begin(i) ─ lookup ─ backward ─ trained(i) ─ begin(i + 1)  counts, restarts and admits rows in the order of
                                                                      training: the same under every plan

The rows of an open batch, from its prefetch to its end, are pinned: their slots are not reused, and only the main
thread changes them. A prefetch writes only to free slots and evicts only rows that no open batch uses, so both threads
can work on the columns at the same time, on different rows. Everything else has two locks. The lock of rows covers
operations that find, move, read and write rows (prefetch, flush, scans) and may be held for a long time. The lock of
headers and open batches is held briefly. ``begin_batch_and_count_ids`` and ``end_trained`` take only this one, and do
not wait for the disk.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.recsys.dynamic.cache.eviction import Policy
from lightning_pipe.recsys.dynamic.cache.id_map import DeviceIdMap, Slots
from lightning_pipe.recsys.dynamic.cache.initial_values import InitialValues
from lightning_pipe.recsys.dynamic.cache.row_columns import RowColumns
from lightning_pipe.recsys.dynamic.cache.row_headers import (
    COPIED,
    HEADER_BYTES,
    BatchStart,
    RowHeaders,
    decode_row_headers,
)
from lightning_pipe.recsys.dynamic.cache.row_slots import CacheStats, RepeatedBatchTrainingState, RowSlots
from lightning_pipe.recsys.dynamic.cache.ticket import OpenBatch, PinnedCacheSlots
from lightning_pipe.recsys.dynamic.store.buffered_store import Change, TableStore
from lightning_pipe.recsys.dynamic.store.row_files import StoredRows
from lightning_pipe.recsys.dynamic.store.row_store import Keys, Records


class RowCache:
    """One rank's part of a table.

    *columns* are the weights [slots, width], then optimizer states [slots, width] or [slots]. The caller owns them and
    changes only rows of batches that have begun. A record of *backing* is a header (count and last step, int64 each)
    followed by the bytes of the row in each column. *state_fill* has the initial value of each optimizer state. The
    other options are those of ``DynamicTable`` and of its module.
    """

    def __init__(
        self,
        table: str,
        columns: Sequence[Tensor],
        backing: TableStore,
        *,
        initial: InitialValues,
        state_fill: Sequence[float] = (),
        policy: Policy = "lru",
        admission_threshold: int = 1,
        ttl: int | None = None,
        check_nan: bool = False,
        ids_of: Callable[[Keys], Keys] | None = None,
        ids: DeviceIdMap | None = None,
    ) -> None:
        self.table = table
        self._columns = RowColumns(columns, state_fill)
        self.capacity = self._columns.capacity
        self._below = backing
        self._headers = RowHeaders(self.capacity, ttl, admission_threshold)
        self._slots = RowSlots(table, self._columns, self._headers, backing, initial, policy, check_nan, ids_of, ids)
        self.ids = ids
        # Lock of rows, which may be held from DeviceIdMap.lookup to DeviceIdMap.apply.
        self.row_lock = threading.RLock()
        self._repeated_training: RepeatedBatchTrainingState | None = None
        # Lock of headers and open batches, held only briefly. A finalizer never waits for it.
        self._lock = threading.Lock()
        # Open batches, in the order of their prefetches, and batches to end, by the next holder of the lock.
        self._open: dict[OpenBatch, None] = {}
        self._dropped: deque[OpenBatch] = deque()

    @property
    def column_shapes_and_dtypes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape of a row and type, for each column."""
        return self._columns.kinds

    @property
    def stats(self) -> CacheStats:
        """Statistics of the cache so far."""
        return replace(self._slots.stats)

    # Called on any thread, for later batches.

    def prefetch(self, keys: Tensor) -> PinnedCacheSlots:
        """Cache the rows of a batch's ids and pin them until the ticket ends."""
        ids = keys.detach().cpu().numpy()
        with self.row_lock:
            slots, rows, missing = self._slots.touch(ids)
            brought, batch = self._pin(rows, ids[missing])
            slots[missing] = brought
            return PinnedCacheSlots(torch.from_numpy(slots), batch, self._dropped)

    def pin(self, summary: Tensor) -> PinnedCacheSlots:
        """Same as ``prefetch``, after :meth:`DeviceIdMap.lookup`; the ticket has only the slots of ids without one."""
        assert self.ids is not None
        with self.row_lock:
            brought, batch = self._pin(*self._slots.record_slot_use(self.ids, summary))
            return PinnedCacheSlots(torch.from_numpy(brought), batch, self._dropped)

    def _pin(self, rows: Slots, missing: Keys) -> tuple[Slots, OpenBatch]:
        """Pin *rows*, and the rows of *missing* ids, whose slots are returned."""
        batch = OpenBatch(rows)
        with self._lock:
            self._end_dropped_batches_and_retry_init()
            self._open[batch] = None
        try:
            if not missing.size:
                return missing, batch
            slots, brought = self._slots.load_rows(missing, self._get_pinned_slot_mask)
            batch.rows = np.concatenate([rows, brought])
            if self._repeated_training is not None:
                self._repeated_training.brought[brought] = True
            return slots, batch
        except BaseException:
            self._discard_batch_nonblocking(batch)
            raise

    def _get_pinned_slot_mask(self) -> tuple[npt.NDArray[np.bool_], int]:
        with self._lock:
            self._end_dropped_batches_and_retry_init()
            pinned = np.zeros(self.capacity, bool)
            for batch in self._open:
                pinned[batch.rows] = True
            return pinned, len(self._open) - 1

    def _end_dropped_batches_and_retry_init(self) -> None:
        """End dropped batches and restart rows that are due, before rows are read. Requires the lock."""
        self._end_dropped_batches()
        self._slots.retry_initialization()

    def _end_dropped_batches(self) -> None:
        while self._dropped:
            batch = self._dropped.popleft()
            if batch.ended:
                continue
            self._end(batch)
            self._columns.order_after(batch.mark)
            if batch.begun is not None:
                self._headers.undo(batch.rows, batch.begun)
                self._slots.initialize_or_retry_later(self._headers.select_unadmitted(batch.rows))

    def _end(self, batch: OpenBatch) -> None:
        batch.ended = True
        self._open.pop(batch, None)

    def begun_steps(self) -> list[int]:
        """Numbers of the batches that have begun and are not trained yet, in ascending order."""
        with self._lock:
            self._end_dropped_batches()
            return [begun.step for _, begun in self._list_begun_batches()]

    def _list_begun_batches(self) -> list[tuple[OpenBatch, BatchStart]]:
        """Batches that have begun, in the order of their steps. Requires the lock."""
        begun = [(batch, batch.begun) for batch in self._open if batch.begun is not None]
        return sorted(begun, key=lambda pair: pair[1].step)

    def _get_open_batch(self, ticket: PinnedCacheSlots) -> OpenBatch:
        if ticket.batch.ended:
            raise PlanError(
                f"table {self.table!r}: the rows of a batch in flight were replaced or released before it was trained;"
                " expected them to stay until its end. Read or forget rows between two fits"
            )
        return ticket.batch

    # Called on the main thread, in the order of training.

    def begin_batch_and_count_ids(self, ticket: PinnedCacheSlots, step: int) -> None:
        """Begin the batch that is trained next: count its rows, restart expired ones and admit rows."""
        with self._lock:
            self._end_dropped_batches_and_retry_init()
            batch = self._get_open_batch(ticket)
            suspended = () if self._repeated_training is None else self._repeated_training.suspended
            open_steps = [begun.step for open_batch, begun in self._list_begun_batches() if open_batch not in suspended]
            ttl = self._headers.ttl
            if ttl is not None and open_steps and step - open_steps[0] > ttl:
                raise PlanError(
                    f"table {self.table!r} has ttl={ttl}, and batch {step} begins before batch {open_steps[0]} is"
                    " trained, so rows of that batch would expire while in use; expected a ttl of at least"
                    f" {step - open_steps[0]} for this plan. Raise ttl, or use a plan that looks batches up later."
                    " (Each call of a module counts as a batch, also within one step.)"
                )
            batch.begun = self._headers.begin_batch_and_count_ids(batch.rows, step)
            self._slots.initialize_rows(batch.begun.expired)
            self._slots.stats.expired += len(batch.begun.expired)

    def reset_expired_rows(self, ticket: PinnedCacheSlots, step: int) -> None:
        """Restart expired rows before the lookup of a batch that is not trained, so that it reads initial values."""
        with self._lock:
            self._end_dropped_batches_and_retry_init()
            expired = self._headers.select_expired(self._get_open_batch(ticket).rows, step)
            if expired.size:
                self._slots.reset_rows(expired)

    def end_trained(self, ticket: PinnedCacheSlots) -> None:
        """End a batch after its backward: unpin its rows, and reset rows that are not admitted to initial values."""
        with self._lock:
            self._end_dropped_batches()
            batch = self._get_open_batch(ticket)
            assert batch.begun is not None
            # This runs on one rank only. An error is raised when the next batch begins, together with the other ranks.
            self._slots.initialize_or_retry_later(batch.begun.young)
            self._slots.stats.held_back += len(batch.begun.young)
            self._columns.order_after(self._columns.record_event())
            self._end(batch)

    def end_untrained(self, ticket: PinnedCacheSlots) -> None:
        """End a batch that is not trained: unpin its rows and revert the counts of its ids, but no updates of rows.

        May be called on any thread, in finalizers, and for tickets that have ended.
        """
        if not ticket.batch.ended:
            ticket.batch.mark = self._columns.record_event()
            self._discard_batch_nonblocking(ticket.batch)

    def _discard_batch_nonblocking(self, batch: OpenBatch) -> None:
        """Discard a batch now, or leave it to the next holder of the lock if the lock is taken."""
        self._dropped.append(batch)
        if self._lock.acquire(blocking=False):
            try:
                self._end_dropped_batches()
            finally:
                self._lock.release()

    # Called on the main thread between batches; prefetches may run at the same time.

    def flush(self) -> None:
        """Write every changed row to the store, as of the last trained batch. Rows stay cached.

        Rows of a batch that has begun but not run its backward are written as if it had not begun.
        """
        with self.row_lock, self._lock:
            for change in self._changes():
                self.write_changes(change)
            self._mark_stored()

    def copy_changes(self) -> list[Change]:
        """Copy every changed row, as ``flush`` would write it, for :meth:`write_changes`. Takes the rows' memory."""
        with self.row_lock, self._lock:
            return list(self._changes())

    def write_changes(self, change: Change) -> None:
        """Write a change to the store. May be called on any thread."""
        self._slots.refuse_nan(change.keys, change.records)
        self._below.write_changes(change)

    def mark_stored(self) -> None:
        """Record that the store has all of the last :meth:`copy_changes`. May be called on any thread."""
        with self.row_lock, self._lock:
            self._mark_stored()

    def _mark_stored(self) -> None:
        self._headers.dirty[self._headers.dirty == COPIED] = 0
        self._below.mark_stored()

    def _changes(self) -> Iterator[Change]:
        self._end_dropped_batches_and_retry_init()
        # Undo from the last batch to the first, then restore in the opposite order.
        begun: list[tuple[Slots, npt.NDArray[np.int64]]] = []
        for batch, noted in reversed(self._list_begun_batches()):
            begun.append((batch.rows, self._headers.values[batch.rows]))
            self._headers.undo(batch.rows, noted)
        try:
            dirty = np.flatnonzero(self._headers.dirty)
            self._headers.dirty[dirty] = COPIED
            yield from self._below.copy_changes(self._slots.map.keys_of(dirty))
            yield from self._slots.copy_changes(dirty)
        finally:
            for rows, headers in reversed(begun):
                self._headers.values[rows] = headers
                self._headers.dirty[rows] = 1

    def clear_without_writing(self) -> None:
        """Empty the cache without writing, because the store's contents were replaced. Ends all tickets."""
        with self.row_lock, self._lock:
            for batch in list(self._open):
                self._end(batch)
            self._slots.clear()
            self._below.clear_host_memory()

    def set_repeated_training(self, repeats_training: bool) -> None:
        """Begin or end a :class:`~lightning_pipe.recsys.dynamic.cache.row_slots.RepeatedBatchTrainingState`."""
        with self.row_lock, self._lock:
            if repeats_training:
                self._below.flush()  # what is written from now on is dropped at the end
            missing = 1 - self.stats.hits / max(1, self.stats.ids)
            brought = np.zeros(self.capacity, bool)
            self._repeated_training = (
                RepeatedBatchTrainingState(list(self._open), missing, brought) if repeats_training else None
            )

    def evict_before_repeated_prefetch(self, keys: Tensor) -> None:
        """Evict rows before a prefetch of *keys*, if the cache is in repeated training."""
        with self.row_lock:
            if self._repeated_training is not None:
                self._slots.evict_before_repeated_prefetch(
                    self._repeated_training, keys.detach().cpu().numpy(), self._get_pinned_slot_mask()[0]
                )

    def snapshot(self) -> tuple[Any, ...]:
        """Copy of all cached rows in host memory, and of the state of the cache."""
        with self.row_lock, self._lock:
            self._end_dropped_batches_and_retry_init()
            self._below.flush()
            return list(self._open), self._slots.snapshot()

    def restore(self, snapshot: tuple[Any, ...]) -> None:
        """Restore a snapshot. Ends batches that were opened after it."""
        with self.row_lock, self._lock:
            opened, slots = snapshot
            for batch in [batch for batch in self._open if batch not in opened]:
                self._end(batch)
            self._slots.restore(slots)
            self._below.clear_host_memory()
            if self._repeated_training is not None:
                self._repeated_training.brought[:] = False

    def erase_expired_rows(self, step: int) -> int:
        """Erase rows last seen more than ``ttl`` steps before *step*. Scans the whole store."""
        if self._headers.ttl is None:
            return 0
        with self.row_lock:
            with self._lock:
                self._end_dropped_batches_and_retry_init()
                cached = self._headers.select_expired(np.flatnonzero(self._slots.get_used_slot_mask()), step)
                self._slots.reset_rows(cached)
                self._slots.write_back(cached)
            number = len(cached)
            for keys, records in self._below.scan(65536):
                ended = keys[step - decode_row_headers(records)[:, 1] > self._headers.ttl]
                # The header of a cached row is newer than the one in the store.
                ended = ended[self._slots.map.find(ended) < 0]
                self._below.erase(ended)
                self._slots.stats.expired += len(ended)
                number += len(ended)
            return number

    def flush_and_scan_rows(self, *, since: int = 0, chunk: int = 65536) -> Iterator[StoredRows]:
        """Flush, and iterate over all rows, cached or not, as they are now, in the store's order."""
        self.flush()
        chunks = (self.decode(keys, records, since) for keys, records in self._below.scan(chunk))
        return (rows for rows in chunks if len(rows.ids))

    def decode(self, keys: Keys, records: Records, since: int = 0) -> StoredRows:
        """Rows of a chunk of records that were last seen in step *since* or later."""
        if since > 0:
            chosen = decode_row_headers(records)[:, 1] >= since
            keys, records = keys[chosen], records[chosen]
        counts, last_seen = (torch.tensor(part) for part in decode_row_headers(records).T)
        return StoredRows(torch.from_numpy(keys), counts, last_seen, self._columns.decode(records[:, HEADER_BYTES:]))
