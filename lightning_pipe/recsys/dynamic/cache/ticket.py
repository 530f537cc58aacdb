"""Batches whose rows are in use: from the prefetch of their rows to the end of their training.

Tested in ``tests/recsys/dynamic/cache/test_row_cache.py``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.recsys.dynamic.cache.id_map import Slots
from lightning_pipe.recsys.dynamic.cache.row_columns import Mark
from lightning_pipe.recsys.dynamic.cache.row_headers import Begun

__all__ = ["Batch", "OpenBatches", "Ticket"]


@dataclass(eq=False)
class Batch:
    """What the cache knows of a batch.

    Attributes:
        rows: its distinct slots; nobody else gets them while it is open.
        begun: where it has begun, what was found.
        ended: it is not open any more.
        mark: behind its use on the device, where it was discarded by a call.
    """

    rows: Slots
    begun: Begun | None = None
    ended: bool = False
    mark: Mark | None = field(default=None, repr=False)


class Ticket:
    """A batch's hold on its rows. One that is forgotten is discarded.

    Attributes:
        slots: of each of the batch's ids the row of the columns that holds it: int64, on the ids' device.
    """

    __slots__ = ("__weakref__", "_dropped", "batch", "slots")

    def __init__(self, slots: Tensor, batch: Batch, dropped: deque[Batch]) -> None:
        self.slots = slots
        self.batch = batch
        self._dropped = dropped

    def __del__(self) -> None:
        # At any place, in any thread, perhaps one that holds the lock: this takes none.
        self._dropped.append(self.batch)


class OpenBatches:
    """The batches that are open, in the order in which they came.

    Args:
        undo: takes back what a batch changed when it began; called with the lock held.
        behind: takes the mark of a batch that was discarded.

    Attributes:
        lock: held short, by whoever changes headers or what is open. It is never waited for in a finaliser.
        dropped: batches that somebody wants ended; whoever next has the lock ends them.
    """

    def __init__(self, undo: Callable[[Batch], None], behind: Callable[[Mark | None], None]) -> None:
        self.lock = threading.Lock()
        self.dropped: deque[Batch] = deque()
        self._undo, self._behind = undo, behind
        self._open: dict[Batch, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, batch: Batch) -> None:
        """With the lock held."""
        self._open[batch] = None

    def begun(self) -> list[tuple[Batch, Begun]]:
        """Those that have begun, in that order. With the lock held."""
        found = [(batch, batch.begun) for batch in self._open if batch.begun is not None]
        return sorted(found, key=lambda pair: pair[1].step)

    def end(self, batch: Batch) -> None:
        """It is trained. With the lock held."""
        batch.ended = True
        self._open.pop(batch, None)

    def drop(self, batch: Batch) -> None:
        """Discard it, now or, where the lock is taken, by whoever has it next."""
        self.dropped.append(batch)
        if self.lock.acquire(blocking=False):
            try:
                self.end_dropped()
            finally:
                self.lock.release()

    def end_dropped(self) -> None:
        """End what was dropped. With the lock held."""
        while self.dropped:
            batch = self.dropped.popleft()
            if batch.ended:
                continue
            self.end(batch)
            self._behind(batch.mark)
            if batch.begun is not None:
                self._undo(batch)

    def end_all(self) -> None:
        """None is open any more, and nothing is undone. With the lock held."""
        for batch in list(self._open):
            self.end(batch)

    def pinned(self, capacity: int) -> npt.NDArray[np.bool_]:
        """Which slots are in use. With the lock held."""
        pinned = np.zeros(capacity, bool)
        for batch in self._open:
            pinned[batch.rows] = True
        return pinned

    def check(self, table: str, ticket: Ticket, begun: bool) -> Batch:
        """The ticket's batch, which must be open, and have begun or not. With the lock held.

        Raises:
            PlanError: it is not.
        """
        batch = ticket.batch
        if batch.ended or (batch.begun is not None) != begun:
            found = "has ended" if batch.ended else "has not begun" if begun else "has begun"
            raise PlanError(
                f"table {table!r}: this batch's ticket {found}, needed is one that {'has' if begun else 'has not'}"
                " begun: call prefetch, begin, and then trained or discard, once for each batch"
            )
        return batch
