"""Headers of cached rows: number of trained batches, step of last use, and whether the store is up to date.

A row with count 0 does not exist for readers: its values are the initial ones, and the store has no record of it or
will erase the record at the next write-back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_pipe.recsys.dynamic.cache.id_map import Slots
from lightning_pipe.recsys.dynamic.store.row_store import Records

# Size of a header in a record: count and last_seen, int64 each.
HEADER_BYTES = 16

# Value of ``dirty`` for a row that was copied for the store, which may not have the copy yet.
COPIED = 2


@dataclass(frozen=True)
class BatchStart:
    """Result of beginning the batch of a step."""

    step: int
    before: npt.NDArray[np.int64]  # step in which each row was last seen before
    expired: Slots  # rows that restart with initial values
    young: Slots  # rows that are not admitted yet


class RowHeaders:
    """Headers of all slots."""

    def __init__(self, capacity: int, ttl: int | None, threshold: int) -> None:
        self.ttl, self._threshold = ttl, threshold
        # Number of trained batches in which each slot's row has occurred, and step of the last one.
        self.values = np.zeros((capacity, 2), np.int64)
        self.counts, self.last_seen = self.values[:, 0], self.values[:, 1]
        # 0 if the store has the current row, 1 if it does not, and COPIED if it will have it.
        self.dirty = np.zeros(capacity, np.uint8)

    def select_expired(self, rows: Slots, step: int) -> Slots:
        """Select the *rows* that have expired at *step*."""
        if self.ttl is None:
            return rows[:0]
        headers = self.values[rows]
        return rows[(headers[:, 0] > 0) & (step - headers[:, 1] > self.ttl)]

    def begin_batch_and_count_ids(self, rows: Slots, step: int) -> BatchStart:
        """Begin a batch: count an occurrence of its *rows*, which are distinct."""
        before = self.last_seen[rows]
        expired = self.select_expired(rows, step)
        self.counts[expired] = 0
        self.counts[rows] += 1
        self.last_seen[rows] = step
        self.dirty[rows] = 1
        return BatchStart(step, before, expired, self.select_unadmitted(rows))

    def undo(self, rows: Slots, begun: BatchStart) -> None:
        """Revert ``begin_batch_and_count_ids``. Rows that it found expired have count 0 afterwards."""
        self.counts[rows] -= 1
        last = self.last_seen[rows] == begun.step
        self.last_seen[rows[last]] = begun.before[last]

    def select_unadmitted(self, rows: Slots) -> Slots:
        """Select the *rows* that are not admitted."""
        return rows[self.counts[rows] < self._threshold]


def decode_row_headers(records: Records) -> npt.NDArray[np.int64]:
    """Count and last step of each record: [records, 2]."""
    return np.array(records[:, :HEADER_BYTES], order="C").view(np.int64)
