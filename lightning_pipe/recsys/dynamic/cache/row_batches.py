"""Bounded cache of rows over a store on disk: one rank's part of a table that has a row for every int64 id.

    worker  prefetch(i + 1) ────────── prefetch(i + 2) ─────────      finds, reads, creates and evicts rows: no effect
                                                                      on training results
    main    begin(i) ─ lookup ─ backward ─ trained(i) ─ begin(i + 1)  counts, restarts and admits rows in the order of
                                                                      training: the same under every plan

The rows of an open batch, from its prefetch to its end, are pinned: their slots are not reused, and only the main
thread changes them. A prefetch writes only to free slots and evicts only rows that no open batch uses, so both threads
can work on the columns at the same time, on different rows. Everything else has two locks. The lock of rows covers
operations that find, move, read and write rows (prefetch, flush, scans) and may be held for a long time. The lock of
headers and open batches is held briefly. ``begin`` and ``trained`` take only this one, and do not wait for the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_pipe.engine.common.errors import InputError, PlanError
from lightning_pipe.recsys.dynamic.cache.device_ids import DeviceIds
from lightning_pipe.recsys.dynamic.cache.eviction import Policy
from lightning_pipe.recsys.dynamic.cache.id_map import Slots
from lightning_pipe.recsys.dynamic.cache.initial_values import InitialValues
from lightning_pipe.recsys.dynamic.cache.rehearsal import Rehearsal
from lightning_pipe.recsys.dynamic.cache.row_columns import RowColumns
from lightning_pipe.recsys.dynamic.cache.row_headers import BYTES, RowHeaders
from lightning_pipe.recsys.dynamic.cache.row_slots import CacheStats, RowSlots
from lightning_pipe.recsys.dynamic.cache.ticket import Batch, OpenBatches, Ticket
from lightning_pipe.recsys.dynamic.store.row_levels import RowLevel
from lightning_pipe.recsys.dynamic.store.row_store import Keys


class RowBatches:
    """Batches of one rank's part of a table: the part of a cache that each batch uses.

    Attributes:
        table: name of the table.
        ids: the same.
        moving: lock of rows, which may be held from :meth:`DeviceIds.look` to :meth:`DeviceIds.apply`.
        capacity: number of slots.
        width: number of bytes of a record.
    """

    def __init__(
        self,
        table: str,
        columns: Sequence[Tensor],
        below: RowLevel,
        *,
        initial: InitialValues,
        state_fill: Sequence[float] = (),
        policy: Policy = "lru",
        admission_threshold: int = 1,
        ttl: int | None = None,
        check_nan: bool = False,
        ids_of: Callable[[Keys], Keys] | None = None,
        ids: DeviceIds | None = None,
    ) -> None:
        self.table = table
        self._columns = RowColumns(table, columns, state_fill)
        self.capacity = self._columns.capacity
        self.width = BYTES + self._columns.width
        self._below = below
        self._headers = RowHeaders(self.capacity, ttl, admission_threshold)
        self._slots = RowSlots(table, self._columns, self._headers, below, initial, policy, check_nan, ids_of, ids)
        self._step: int | None = None
        self._version = 0  # incremented whenever rows or headers change, which invalidates scans
        self.ids, self.moving = ids, threading.RLock()
        self._rehearsal: Rehearsal | None = None
        self._open = OpenBatches(self._undo, self._columns.behind)
        self._lock = self._open.lock

    @property
    def columns(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape of a row and type, for each column."""
        return self._columns.kinds

    @property
    def stats(self) -> CacheStats:
        """Statistics of the cache so far."""
        return replace(self._slots.stats)

    # Called on any thread, for later batches.

    def prefetch(self, keys: Tensor) -> Ticket:
        """Cache the rows of a batch's ids and pin them until the ticket ends."""
        if keys.dtype != torch.int64 or keys.ndim != 1:
            raise InputError(
                f"table {self.table!r} got ids of {keys.dtype} and shape {tuple(keys.shape)}; expected a vector of"
                " int64. Convert the ids"
            )
        ids = keys.detach().cpu().numpy()
        with self.moving:
            slots, rows, missing = self._slots.touch(ids)
            brought, batch = self._pin(rows, ids[missing])
            slots[missing] = brought
            return Ticket(torch.from_numpy(slots), batch, self._open.dropped)

    def pin(self, found: Tensor) -> Ticket:
        """Same as ``prefetch``, after :meth:`DeviceIds.look`; the ticket has only the slots of ids without a slot."""
        assert self.ids is not None
        with self.moving:
            brought, batch = self._pin(*self._slots.use(self.ids, found))
            return Ticket(torch.from_numpy(brought), batch, self._open.dropped)

    def _pin(self, rows: Slots, missing: Keys) -> tuple[Slots, Batch]:
        """Pin *rows*, and the rows of *missing* ids, whose slots are returned."""
        batch = Batch(rows)
        with self._lock:
            self._bring_up_to_date()
            self._open.add(batch)
        try:
            if not missing.size:
                return missing, batch
            slots, brought = self._slots.bring(missing, self._pinned)
            batch.rows = np.concatenate([rows, brought])
            if self._rehearsal is not None:
                self._rehearsal.brings(brought)
            return slots, batch
        except BaseException:
            self._open.drop(batch)
            raise

    def _pinned(self) -> tuple[npt.NDArray[np.bool_], int]:
        with self._lock:
            self._bring_up_to_date()
            return self._open.pinned(self.capacity), len(self._open) - 1

    def _bring_up_to_date(self) -> None:
        """End dropped batches and restart rows that are due, before rows are read. Requires the lock."""
        self._open.end_dropped()
        self._slots.settle()

    # Called on the main thread, in the order of training.

    def begin(self, ticket: Ticket, step: int) -> None:
        """Begin the batch that is trained next: count its rows, restart expired ones and admit rows."""
        with self._lock:
            self._bring_up_to_date()
            batch = self._open.check(self.table, ticket, begun=False)
            others = self._open.begun(but=() if self._rehearsal is None else self._rehearsal.suspended)
            if (self._step is not None and step < self._step) or (others and step <= others[-1][1].step):
                raise PlanError(
                    f"table {self.table!r}: step {step} begins after step {self._step}; expected increasing steps."
                    " Begin batches in the order in which they are trained"
                )
            ttl = self._headers.ttl
            if ttl is not None and others and step - others[0][1].step > ttl:
                raise PlanError(
                    f"table {self.table!r} has ttl={ttl}, and batch {step} begins before batch {others[0][1].step} is"
                    " trained, so rows of that batch would expire while in use; expected a ttl of at least"
                    f" {step - others[0][1].step} for this plan. Raise ttl, or use a plan that looks batches up later."
                    " (Each call of a module counts as a batch, also within one step.)"
                )
            self._step = step
            self._version += 1
            batch.begun = self._headers.begin(batch.rows, step)
            self._slots.start(batch.begun.expired)
            self._slots.stats.expired += len(batch.begun.expired)

    def expire(self, ticket: Ticket, step: int) -> None:
        """Restart expired rows before the lookup of a batch that is not trained, so that it reads initial values."""
        with self._lock:
            self._bring_up_to_date()
            expired = self._headers.expired(self._open.check(self.table, ticket, begun=False).rows, step)
            if expired.size:
                self._version += 1
                self._slots.forget(expired)

    def trained(self, ticket: Ticket) -> None:
        """End a batch after its backward: unpin its rows, and reset rows that are not admitted to initial values."""
        with self._lock:
            self._open.end_dropped()
            batch = self._open.check(self.table, ticket, begun=True)
            assert batch.begun is not None
            self._version += 1
            # This runs on one rank only. An error is raised when the next batch begins, together with the other ranks.
            self._slots.start_or_owe(batch.begun.young)
            self._slots.stats.held_back += len(batch.begun.young)
            self._columns.behind(self._columns.mark())
            self._open.end(batch)

    def discard(self, ticket: Ticket) -> None:
        """End a batch that is not trained: unpin its rows and revert the counts of ``begin``, if it was called.

        May be called on any thread, in finalisers, and for tickets that have ended. Updates that a backward has already
        made to existing rows are not reverted.
        """
        if not ticket.batch.ended:
            ticket.batch.mark = self._columns.mark()
            self._open.drop(ticket.batch)

    def _undo(self, batch: Batch) -> None:
        assert batch.begun is not None
        self._version += 1
        self._headers.undo(batch.rows, batch.begun)
        self._slots.start_or_owe(self._headers.young(batch.rows))
