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
BYTES = 16

# Value of ``dirty`` for a row that was copied for the store, which may not have the copy yet.
COPIED = 2


@dataclass(frozen=True)
class Begun:
    """Result of beginning a batch.

    Attributes:
        step: number of the batch.
        before: step in which each row was last seen before this batch.
        expired: rows of the batch that restart with initial values.
        young: rows of the batch that are not admitted yet.
    """

    step: int
    before: npt.NDArray[np.int64]
    expired: Slots
    young: Slots


class RowHeaders:
    """Headers of all slots.

    Attributes:
        ttl: maximum number of steps since a row was last seen.
        counts: number of trained batches in which each slot's row has occurred.
        last_seen: step of the last such batch.
        dirty: 0 if the store has the current row, 1 if it does not, and ``COPIED`` if it will have it.
    """

    def __init__(self, capacity: int, ttl: int | None, threshold: int) -> None:
        self.ttl, self._threshold = ttl, threshold
        self._headers = np.zeros((capacity, 2), np.int64)
        self.counts, self.last_seen = self._headers[:, 0], self._headers[:, 1]
        self.dirty = np.zeros(capacity, np.uint8)

    def read(self, rows: Slots) -> npt.NDArray[np.int64]:
        """Count and last step of *rows*: [rows, 2]."""
        return self._headers[rows]

    def write(self, rows: Slots, headers: npt.NDArray[np.int64]) -> None:
        """Write headers in the format of ``read``."""
        self._headers[rows] = headers

    def snapshot(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Copies of all headers and of ``dirty``."""
        return self._headers.copy(), self.dirty.copy()

    def restore(self, kept: tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]) -> None:
        """Replace all headers and ``dirty`` by those of a snapshot."""
        self._headers[:], self.dirty[:] = kept

    def clear(self, rows: Slots) -> None:
        """Mark *rows* as nonexistent. The caller sets ``dirty`` if the store must erase them."""
        self._headers[rows] = 0

    def expired(self, rows: Slots, step: int) -> Slots:
        """Select the *rows* that have expired at *step*."""
        if self.ttl is None:
            return rows[:0]
        headers = self._headers[rows]
        return rows[(headers[:, 0] > 0) & (step - headers[:, 1] > self.ttl)]

    def expired_headers(self, headers: npt.NDArray[np.int64], step: int) -> npt.NDArray[np.bool_]:
        """Mask of the *headers* [rows, 2] whose rows have expired at *step*."""
        if self.ttl is None:
            return np.zeros(len(headers), bool)
        return step - headers[:, 1] > self.ttl

    def begin(self, rows: Slots, step: int) -> Begun:
        """Begin a batch: count an occurrence of its *rows*, which are distinct."""
        before = self.last_seen[rows]
        expired = self.expired(rows, step)
        self.counts[expired] = 0
        self.counts[rows] += 1
        self.last_seen[rows] = step
        self.dirty[rows] = 1
        return Begun(step, before, expired, self.young(rows))

    def undo(self, rows: Slots, begun: Begun) -> None:
        """Revert ``begin``. Rows that had expired at ``begin`` have count 0 afterwards."""
        self.counts[rows] -= 1
        last = self.last_seen[rows] == begun.step
        self.last_seen[rows[last]] = begun.before[last]

    def young(self, rows: Slots) -> Slots:
        """Select the *rows* that are not admitted."""
        return rows[self.counts[rows] < self._threshold]


def headers_of(records: Records) -> npt.NDArray[np.int64]:
    """Count and last step of each record: [records, 2]."""
    return np.array(records[:, :BYTES], order="C").view(np.int64)
