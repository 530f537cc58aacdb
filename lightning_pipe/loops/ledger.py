"""The in-flight ledger: every fetched batch is fetched, in flight or trained, and is lost in none of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LedgerEntry:
    """One batch in flight.

    Args:
        index: position of the batch in what the loader gave since the ledger was opened, counted from 0.
        is_last: whether the loader had no more batches after it.
    """

    index: int
    is_last: bool


class InFlightLedger(Iterator[Any]):
    """Gives batches to the pipeline and remembers those that are not trained yet, in order.

    Args:
        fetch: returns the next batch and whether it is the loader's last one; raises ``StopIteration`` after that.
    """

    def __init__(self, fetch: Callable[[], tuple[Any, bool]]) -> None:
        self._fetch = fetch
        self._in_flight: deque[LedgerEntry] = deque()
        self.fetched = 0
        self.trained = 0

    def __next__(self) -> Any:
        batch, is_last = self._fetch()
        self._in_flight.append(LedgerEntry(self.fetched, is_last))
        self.fetched += 1
        return batch

    @property
    def oldest(self) -> LedgerEntry:
        """The batch being trained."""
        return self._in_flight[0]

    @property
    def in_flight(self) -> int:
        """Batches given to the pipeline and not trained yet."""
        return len(self._in_flight)

    def retire(self) -> LedgerEntry:
        """Note that the oldest batch is trained."""
        self.trained += 1
        return self._in_flight.popleft()

    def give_up(self) -> int:
        """Note that what is in flight will not be trained; returns how many batches that are."""
        given_up = len(self._in_flight)
        self._in_flight.clear()
        return given_up
