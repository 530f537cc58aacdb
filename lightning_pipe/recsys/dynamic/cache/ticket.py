"""Open batches, whose rows are in use from their prefetch to the end of their training."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.recsys.dynamic.cache.id_map import Slots
from lightning_pipe.recsys.dynamic.cache.row_columns import Mark
from lightning_pipe.recsys.dynamic.cache.row_headers import Begun


@dataclass(eq=False)
class Batch:
    """State of a batch in the cache.

    Attributes:
        rows: distinct slots of the batch. They are not reused while the batch is open.
        begun: result of beginning the batch; None before.
        ended: True if the batch is no longer open.
        mark: event after its use on the device, if it was discarded explicitly.
    """

    rows: Slots
    begun: Begun | None = None
    ended: bool = False
    mark: Mark | None = field(default=None, repr=False)


class Ticket:
    """Pins the rows of a batch. A ticket that is garbage collected discards its batch.

    Attributes:
        slots: slot of each of the batch's ids, int64, on the host.
        batch: state of the batch.
    """

    __slots__ = ("__weakref__", "_dropped", "batch", "slots")

    def __init__(self, slots: Tensor, batch: Batch, dropped: deque[Batch]) -> None:
        self.slots = slots
        self.batch = batch
        self._dropped = dropped

    def __del__(self) -> None:
        # May run anywhere, on any thread, even one that holds the lock. It must not take a lock.
        self._dropped.append(self.batch)


class OpenBatches:
    """Open batches, in the order of their prefetches.

    Attributes:
        lock: lock of headers and open batches, held only briefly. A finaliser never waits for it.
        dropped: batches to end; the next holder of the lock ends them.
    """

    def __init__(self, undo: Callable[[Batch], None], discarded: Callable[[Mark | None], None]) -> None:
        self.lock = threading.Lock()
        self.dropped: deque[Batch] = deque()
        self._undo, self._discarded = undo, discarded
        self._open: dict[Batch, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, batch: Batch) -> None:
        """Add a batch. Requires the lock."""
        self._open[batch] = None

    def begun(self, but: Sequence[Batch] = ()) -> list[tuple[Batch, Begun]]:
        """Batches that have begun, except *but*, in the order of their steps. Requires the lock."""
        found = [(batch, batch.begun) for batch in self._open if batch.begun is not None and batch not in but]
        return sorted(found, key=lambda pair: pair[1].step)

    def end(self, batch: Batch) -> None:
        """End a batch. Requires the lock."""
        batch.ended = True
        self._open.pop(batch, None)

    def drop(self, batch: Batch) -> None:
        """Discard a batch now, or leave it to the next holder of the lock if the lock is taken."""
        self.dropped.append(batch)
        if self.lock.acquire(blocking=False):
            try:
                self.end_dropped()
            finally:
                self.lock.release()

    def end_dropped(self) -> None:
        """End dropped batches. Requires the lock."""
        while self.dropped:
            batch = self.dropped.popleft()
            if batch.ended:
                continue
            self.end(batch)
            self._discarded(batch.mark)
            if batch.begun is not None:
                self._undo(batch)

    def all(self) -> list[Batch]:
        """All open batches. Requires the lock."""
        return list(self._open)

    def end_all(self, but: Sequence[Batch] = ()) -> None:
        """End all batches, except *but*, without reverting their changes. Requires the lock."""
        for batch in [one for one in self._open if one not in but]:
            self.end(batch)

    def pinned(self, capacity: int) -> npt.NDArray[np.bool_]:
        """Mask of the slots in use. Requires the lock."""
        pinned = np.zeros(capacity, bool)
        for batch in self._open:
            pinned[batch.rows] = True
        return pinned

    def check(self, table: str, ticket: Ticket, begun: bool) -> Batch:
        """Return the ticket's batch. Requires the lock."""
        batch = ticket.batch
        if batch.ended or (batch.begun is not None) != begun:
            found = "has ended" if batch.ended else "has not begun" if begun else "has begun"
            raise PlanError(
                f"table {table!r}: this batch's ticket {found}; expected a ticket that {'has' if begun else 'has not'}"
                " begun. Call prefetch, begin, and then trained or discard, once for each batch"
            )
        return batch
