"""Repeated training of the same batches, as a profile does it, over a cache whose state is restored afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_pipe.recsys.dynamic.cache.id_map import Slots
from lightning_pipe.recsys.dynamic.cache.ticket import Batch


class Rehearsal:
    """Rows that the batches of a rehearsal have brought into a cache.

    They leave it when a later batch is prefetched, so that a batch that is trained again reads its rows from below, as
    batches of new data do. A batch that was trained recently has more of its rows in the cache than it had then.
    Therefore those of its rows that have occurred in the fewest batches leave the cache before its prefetch, until as
    large a share of its ids is missing as in the prefetches so far.

    Attributes:
        suspended: open batches of the suspended training.
    """

    def __init__(self, capacity: int, suspended: Sequence[Batch], missing: float) -> None:
        self.suspended = list(suspended)
        self._missing = missing
        self._brought = np.zeros(capacity, bool)

    def surplus(self, ids: int, missing: int) -> int:
        """Number of rows that must leave the cache before a prefetch of *ids*, of which *missing* have no row in it."""
        return max(0, round(self._missing * ids) - missing)

    def brings(self, rows: Slots) -> None:
        """Note rows that a batch brings."""
        self._brought[rows] = True

    def leaving(self, used: npt.NDArray[np.bool_], pinned: npt.NDArray[np.bool_]) -> Slots:
        """Rows that were brought and are no longer pinned; they are forgotten here."""
        rows = np.flatnonzero(self._brought & used & ~pinned)
        self._brought[rows] = False
        return rows

    def forget(self) -> None:
        """Forget all rows, because the cache was restored."""
        self._brought[:] = False
