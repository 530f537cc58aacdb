"""A bounded cache of rows over a store on disk: one rank's part of a table that has a row for every int64 id.

    worker  prefetch(i + 1) ────────── prefetch(i + 2) ─────────      finds, reads, makes, evicts rows: has no effect on
                                                                      what is trained
    main    begin(i) ─ lookup ─ backward ─ trained(i) ─ begin(i + 1)  counts rows, starts some anew, admits some: in the
                                                                      order of training, so the same under every plan

A row of a batch that is open, from its prefetch to its end, is pinned: its slot is nobody else's, and only the main
thread changes it. A prefetch writes to slots that are free and takes from those that no open batch has. So both work on
the columns at the same time, on different rows. Two locks keep the rest apart. One is for what finds, moves, reads and
writes rows (prefetch, flush, scans) and may be held for long. The other is for headers and for what is open, and is
held short. ``begin`` and ``trained`` need only that, so the main thread does not wait for the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_pipe.engine.common.errors import InputError, PlanError, SetupError
from lightning_pipe.recsys.dynamic.cache.eviction import Policy, checked_policy
from lightning_pipe.recsys.dynamic.cache.id_map import Slots
from lightning_pipe.recsys.dynamic.cache.initial_values import InitialValues
from lightning_pipe.recsys.dynamic.cache.row_columns import RowColumns
from lightning_pipe.recsys.dynamic.cache.row_headers import BYTES, RowHeaders
from lightning_pipe.recsys.dynamic.cache.row_slots import CacheStats, RowSlots, headers_of
from lightning_pipe.recsys.dynamic.cache.ticket import Batch, OpenBatches, Ticket
from lightning_pipe.recsys.dynamic.store.row_store import Keys, Records, RowStore

__all__ = ["CacheStats", "CachedRows", "RowCache", "Ticket"]


@dataclass(frozen=True)
class CachedRows:
    """Some rows of a table.

    Attributes:
        keys: their ids.
        counts: in how many trained batches each has occurred.
        last_seen: the step of the last of these.
        columns: weights, and states of the optimiser, as the table's columns are.
    """

    keys: Keys
    counts: npt.NDArray[np.int64]
    last_seen: npt.NDArray[np.int64]
    columns: list[Tensor]


class RowCache:
    """One rank's part of one table.

    Args:
        table: its name in the store.
        columns: weights, slots x numbers, then the optimiser's states, slots x numbers or slots alone. They stay the
            caller's, who changes rows of batches that have begun, and no others.
        store: where all rows live that are not cached. A record is a header (count and last step, int64 each) and the
            bytes of each column's row.
        store_lock: one for all caches of a store, which is called by one thread at a time.
        initial: a row's first weights.
        state_fill: with what a row's states begin, one number for each column but the first.
        policy: which rows leave a full cache; see :func:`~lightning_pipe.recsys.dynamic.cache.eviction.victims`.
        admission_threshold: an id is trained from the batch on that is the so many-th in which it occurs. Before that
            it reads its initial values, and what the optimiser does to its row is taken back. Batches are counted, not
            occurrences: how often a batch repeats an id is lost where ids are made distinct on the way here.
        ttl: a row that was last seen more than so many steps ago starts anew; None: none ever does. At least the steps
            between two batches that have begun at the same time, where a plan begins one before another is trained.
        check_nan: refuse to hand the store a row with NaN.
        ids_of: what messages call keys; None for the keys themselves.

    Attributes:
        table: as given.
        capacity: slots.
        width: bytes of a record.

    Raises:
        SetupError: arguments that do not fit each other.
    """

    def __init__(
        self,
        table: str,
        columns: Sequence[Tensor],
        store: RowStore,
        *,
        store_lock: threading.Lock,
        initial: InitialValues,
        state_fill: Sequence[float] = (),
        policy: Policy = "lru",
        admission_threshold: int = 1,
        ttl: int | None = None,
        check_nan: bool = False,
        ids_of: Callable[[Keys], Keys] | None = None,
    ) -> None:
        if admission_threshold < 1 or (ttl is not None and ttl < 1):
            raise SetupError(
                f"table {table!r}: admission_threshold={admission_threshold} and ttl={ttl}, needed are 1 or more, or"
                " ttl=None for rows that stay: change them"
            )
        self.table = table
        self._columns = RowColumns(table, columns, state_fill)
        self.capacity = self._columns.capacity
        self.width = BYTES + self._columns.width
        self._store, self._store_lock = store, store_lock
        self._headers = RowHeaders(self.capacity, ttl, admission_threshold)
        policy = checked_policy(table, policy)
        self._slots = RowSlots(
            table, self._columns, self._headers, store, store_lock, initial, policy, check_nan, ids_of
        )
        self._step: int | None = None
        # Raised whenever rows or headers change: a scan must not go on then.
        self._version = 0
        self._rows_lock = threading.Lock()
        self._open = OpenBatches(self._undo, self._columns.behind)
        self._lock = self._open.lock

    @property
    def columns(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape of a row in each column, and the column's type."""
        return self._columns.kinds

    @property
    def stats(self) -> CacheStats:
        """What happened so far."""
        return replace(self._slots.stats)

    # In any thread, for batches to come.

    def prefetch(self, keys: Tensor) -> Ticket:
        """Make the rows of a batch's ids be there until its ticket ends.

        Args:
            keys: int64, a vector; ids may repeat.

        Raises:
            InputError: more rows are in use at once than there are slots; ``check_nan`` found one in a row that was to
                leave; *keys* are something else. No row is lost, and none pinned.
            SetupError: of the store; likewise.
        """
        if keys.dtype != torch.int64 or keys.ndim != 1:
            raise InputError(
                f"table {self.table!r}: ids of {keys.dtype} and shape {tuple(keys.shape)}, needed is a vector of int64:"
                " convert them"
            )
        ids = keys.detach().cpu().numpy()
        with self._rows_lock:
            slots, rows, missing = self._slots.touch(ids)
            batch = Batch(rows)
            with self._lock:
                self._bring_up_to_date()
                self._open.add(batch)
            try:
                if missing.size:
                    slots[missing], brought = self._slots.bring(ids[missing], self._pinned)
                    batch.rows = np.concatenate([rows, brought])
                return Ticket(torch.from_numpy(slots).to(keys.device), batch, self._open.dropped)
            except BaseException:
                self._open.drop(batch)
                raise

    def _pinned(self) -> tuple[npt.NDArray[np.bool_], int]:
        with self._lock:
            self._bring_up_to_date()
            return self._open.pinned(self.capacity), len(self._open) - 1

    def _bring_up_to_date(self) -> None:
        """Before rows are read: what was dropped has ended, and what is to start anew has. With the lock held."""
        self._open.end_dropped()
        self._slots.settle()

    # On the main thread, in the order of training.

    def begin(self, ticket: Ticket, step: int) -> None:
        """The batch is trained next: its rows are counted, start anew where nobody saw them for long, are admitted.

        Args:
            ticket: of a prefetch.
            step: number of the batch among those that are trained; it rises from one to the next.

        Raises:
            PlanError: a step that does not rise, a ticket that has begun or ended, or a ``ttl`` that is over before a
                batch that has begun is trained.
        """
        with self._lock:
            self._bring_up_to_date()
            batch = self._open.check(self.table, ticket, begun=False)
            others = self._open.begun()
            if (self._step is not None and step < self._step) or (others and step <= others[-1][1].step):
                raise PlanError(
                    f"table {self.table!r}: step {step} begins after step {self._step}, needed are rising steps: begin"
                    " batches in the order in which they are trained"
                )
            ttl = self._headers.ttl
            if ttl is not None and others and step - others[0][1].step > ttl:
                raise PlanError(
                    f"table {self.table!r} has ttl={ttl}, and batch {step} begins before batch {others[0][1].step} is"
                    " trained, whose rows would start anew under it; needed is a ttl of at least"
                    f" {step - others[0][1].step} for this plan: raise it, or take a plan that looks batches up later."
                    " (A module that is called several times in a step counts as many batches.)"
                )
            self._step = step
            self._version += 1
            batch.begun = self._headers.begin(batch.rows, step)
            self._slots.start(batch.begun.expired)
            self._slots.stats.expired += len(batch.begun.expired)

    def expire(self, ticket: Ticket, step: int) -> None:
        """Before the lookup of a batch that is not trained: rows that nobody saw for long read their initial values.

        Args:
            ticket: of a prefetch.
            step: of the batch that was trained last.
        """
        with self._lock:
            self._bring_up_to_date()
            expired = self._headers.expired(self._open.check(self.table, ticket, begun=False).rows, step)
            if expired.size:
                self._version += 1
                self._slots.forget(expired)

    def trained(self, ticket: Ticket) -> None:
        """The batch's backward is done: its rows may leave, and those that are not admitted are as they were.

        Raises:
            PlanError: a ticket that has not begun, or has ended.
        """
        with self._lock:
            self._open.end_dropped()
            batch = self._open.check(self.table, ticket, begun=True)
            assert batch.begun is not None
            self._version += 1
            # On this rank alone: what goes wrong is raised where the next batch begins, with the other ranks.
            self._slots.start_or_owe(batch.begun.young)
            self._slots.stats.held_back += len(batch.begun.young)
            self._columns.behind(self._columns.mark())
            self._open.end(batch)

    def discard(self, ticket: Ticket) -> None:
        """The batch is not trained: its rows may leave, and where it had begun, it has not been seen.

        In any thread, in finalisers, and for tickets that have ended. What a backward has already done to rows that
        were there before stays.
        """
        if not ticket.batch.ended:
            ticket.batch.mark = self._columns.mark()
            self._open.drop(ticket.batch)

    def _undo(self, batch: Batch) -> None:
        assert batch.begun is not None
        self._version += 1
        self._headers.undo(batch.rows, batch.begun)
        self._slots.start_or_owe(self._headers.young(batch.rows))

    # On the main thread, between batches; others may be prefetched meanwhile.

    def flush(self) -> None:
        """Make the store have every row as it is behind the last trained batch. Rows stay cached.

        A batch that has begun, and whose backward has not, is written as if it had not begun.

        Raises:
            InputError: of ``check_nan``.
            SetupError: of the store. What was not written can be with the next call.
        """
        with self._rows_lock, self._lock:
            self._bring_up_to_date()
            # From the last to the first, and back.
            kept: list[tuple[Slots, npt.NDArray[np.int64]]] = []
            for batch, begun in reversed(self._open.begun()):
                kept.append((batch.rows, self._headers.read(batch.rows)))
                self._headers.undo(batch.rows, begun)
            try:
                self._slots.write_back(self._slots.dirty())
            finally:
                for rows, headers in reversed(kept):
                    self._headers.write(rows, headers)
                    self._headers.dirty[rows] = 1

    def forget(self) -> None:
        """Empty the cache, and write nothing: the store holds something else now. Tickets have ended."""
        with self._rows_lock, self._lock:
            self._version += 1
            self._step = None
            self._open.end_all()
            self._slots.clear()

    def purge(self, step: int) -> int:
        """Erase rows that were last seen more than ``ttl`` steps before *step*. Scans the store.

        Returns:
            how many.
        """
        if self._headers.ttl is None:
            return 0
        with self._rows_lock:
            with self._lock:
                self._bring_up_to_date()
                self._version += 1
                cached = self._slots.expired(step)
                self._slots.forget(cached)
                self._slots.write_back(cached)
            stored: list[Keys] = []
            for keys, records in self._scan(65536):
                ended = keys[self._headers.expired_headers(headers_of(records), step)]
                # Where a row is cached, its header there is the newer one.
                stored.append(ended[self._slots.map.find(ended) < 0])
            for keys in stored:
                if keys.size:
                    with self._store_lock:
                        self._store.erase(self.table, keys)
            number = sum(map(len, stored))
            self._slots.stats.expired += number
            return number + len(cached)

    def rows(self, *, since: int | None = None, step: int | None = None, chunk: int = 65536) -> Iterator[CachedRows]:
        """All rows, cached or not, in the store's order. Flushes first.

        Args:
            since: only rows that were last seen at this step or later.
            step: of the batch that was trained last: rows that have expired by then are left out.
            chunk: rows at a time, at most.

        Raises:
            PlanError: a batch was trained, or rows were erased, since the scan began.
        """
        self.flush()
        version = self._version
        scan = self._scan(chunk)
        while True:
            with self._rows_lock:
                if self._version != version:
                    raise PlanError(
                        f"table {self.table!r} has changed while its rows were scanned, needed is one that stays as it"
                        " is: end the scan before the next batch"
                    )
                found = next(scan, None)
            if found is None:
                return
            keys, records = found
            headers = headers_of(records)
            chosen = np.ones(len(keys), bool) if since is None else headers[:, 1] >= since
            if step is not None:
                chosen &= ~self._headers.expired_headers(headers, step)
            if chosen.any():
                counts, last_seen = headers[chosen].T
                yield CachedRows(keys[chosen], counts, last_seen, self._columns.typed(records[chosen][:, BYTES:]))

    def _scan(self, chunk: int) -> Iterator[tuple[Keys, Records]]:
        """The store's, each step with its lock."""
        with self._store_lock:
            scan = self._store.scan(self.table, chunk)
        while True:
            with self._store_lock:
                found = next(scan, None)
            if found is None:
                return
            yield found
