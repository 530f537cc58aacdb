"""What is known of each cached row beside its values: how often and when it was trained, whether the store has it so.

A row with count 0 is not there as far as anybody can see: the store has no record of it, or is yet to be told to
forget it, and its values are the initial ones.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lightning_pipe.recsys.dynamic.cache.id_map import Slots
from lightning_pipe.recsys.kernels import native

__all__ = ["BYTES", "Begun", "RowHeaders"]

# Of a header in a record: count and last_seen, int64 each.
BYTES = 16


@dataclass(frozen=True)
class Begun:
    """What a batch found when it began.

    Attributes:
        step: its number.
        before: when each of its rows was last seen before.
        expired: its rows that start anew.
        young: its rows that are not admitted yet.
    """

    step: int
    before: npt.NDArray[np.int64]
    expired: Slots
    young: Slots


class RowHeaders:
    """Headers of all slots.

    Args:
        capacity: slots.
        ttl: a row not seen for more than so many steps starts anew; None: never.
        threshold: the count from which on a row is admitted.

    Attributes:
        ttl: as given.
        counts: in how many trained batches the row has occurred, by slot.
        last_seen: at which step it last did.
        dirty: 1 where the store does not have the row as it is.
    """

    def __init__(self, capacity: int, ttl: int | None, threshold: int) -> None:
        self.ttl, self._threshold = ttl, threshold
        self._headers = np.zeros((capacity, 2), np.int64)
        self.counts, self.last_seen = self._headers[:, 0], self._headers[:, 1]
        self.dirty = np.zeros(capacity, np.uint8)
        self._library = native.library()

    def read(self, rows: Slots) -> npt.NDArray[np.int64]:
        """Count and last step of each: rows x 2."""
        return self._headers[rows]

    def write(self, rows: Slots, headers: npt.NDArray[np.int64]) -> None:
        """As ``read`` gave them."""
        self._headers[rows] = headers

    def clear(self, rows: Slots) -> None:
        """Rows that are not there; whether the store must be told is the caller's to note."""
        self._headers[rows] = 0

    def expired(self, rows: Slots, step: int) -> Slots:
        """Those of *rows* that were last seen too long before *step*."""
        if self.ttl is None:
            return rows[:0]
        headers = self._headers[rows]
        return rows[(headers[:, 0] > 0) & (step - headers[:, 1] > self.ttl)]

    def expired_headers(self, headers: npt.NDArray[np.int64], step: int) -> npt.NDArray[np.bool_]:
        """Which headers, rows x 2, are of rows last seen too long before *step*."""
        if self.ttl is None:
            return np.zeros(len(headers), bool)
        return step - headers[:, 1] > self.ttl

    def begin(self, rows: Slots, step: int) -> Begun:
        """A batch begins: its rows, distinct, are seen once more."""
        if self._library is None:
            return self._begin_slowly(rows, step)
        before, expired, young, numbers = (np.empty(size, np.int64) for size in (*[len(rows)] * 3, 2))
        ttl = -1 if self.ttl is None else self.ttl
        self._library.lp_row_headers_begin(
            *(ctypes.c_void_p(array.ctypes.data) for array in (self._headers, self.dirty, rows)),
            *(ctypes.c_int64(number) for number in (len(rows), step, ttl, self._threshold)),
            *(ctypes.c_void_p(array.ctypes.data) for array in (before, expired, young, numbers)),
        )
        return Begun(step, before, expired[: numbers[0]].copy(), young[: numbers[1]].copy())

    def _begin_slowly(self, rows: Slots, step: int) -> Begun:
        before = self.last_seen[rows]
        expired = self.expired(rows, step)
        self.counts[expired] = 0
        self.counts[rows] += 1
        self.last_seen[rows] = step
        self.dirty[rows] = 1
        return Begun(step, before, expired, self.young(rows))

    def undo(self, rows: Slots, begun: Begun) -> None:
        """As if the batch had not begun; rows that started anew are those that are not there."""
        self.counts[rows] -= 1
        last = self.last_seen[rows] == begun.step
        self.last_seen[rows[last]] = begun.before[last]

    def young(self, rows: Slots) -> Slots:
        """Those of *rows* that are not admitted."""
        return rows[self.counts[rows] < self._threshold]
