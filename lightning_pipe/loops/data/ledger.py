"""In-flight ledger: tracks every batch from its fetch to its training, so that no batch is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_pipe.loops.data.batch_source import Fetched


@dataclass(frozen=True)
class LedgerEntry:
    """Batch in flight.

    Args:
        index: number of batches fetched before this one since the ledger was created.
        is_last: True if the loader had no more batches after this one.
        batch: the batch as fetched, if the ledger holds batches, else None.
        after: positions of the loader and the random streams after the batch. Other code may add entries.
    """

    index: int
    is_last: bool
    batch: Any = None
    after: dict[str, Any] = field(default_factory=dict)


class InFlightLedger(Iterator[Any]):
    """Passes batches to the pipeline and tracks the ones that are not trained yet, in order.

    Args:
        fetch: function that returns the next batch, and raises ``StopIteration`` after the last one.
        keeps_batches: True to hold batches as fetched until they are trained, so that :meth:`abandon` can return them
            (default False).

    Attributes:
        keeps_batches: as the argument, for batches fetched from now on.
        fetched: number of batches fetched.
        trained: number of batches trained.
        last_done: batch that was trained or skipped last.
        done_before: batch that was trained or skipped before ``last_done``.
    """

    def __init__(
        self,
        fetch: Callable[[], Fetched],
        *,
        keeps_batches: bool = False,
    ) -> None:
        self._fetch = fetch
        self.keeps_batches = keeps_batches
        self._in_flight: deque[LedgerEntry] = deque()
        self._to_transfer: deque[LedgerEntry] = deque()
        self.fetched = 0
        self.trained = 0
        self.last_done: LedgerEntry | None = None
        self.done_before: LedgerEntry | None = None

    def __next__(self) -> Any:
        batch, is_last, after = self._fetch()
        entry = LedgerEntry(self.fetched, is_last, batch if self.keeps_batches else None, after)
        self._in_flight.append(entry)
        self._to_transfer.append(entry)
        self.fetched += 1
        return batch

    @property
    def oldest(self) -> LedgerEntry:
        """Oldest batch in flight, which is being trained."""
        return self._in_flight[0]

    @property
    def num_in_flight(self) -> int:
        """Number of batches passed to the pipeline and not trained yet."""
        return len(self._in_flight)

    def pop_next_transfer(self) -> LedgerEntry | None:
        """Return the batch to move to the device next, each batch once; None if all have been returned."""
        return self._to_transfer.popleft() if self._to_transfer else None

    def retire(self) -> LedgerEntry:
        """Record that the oldest batch has been trained."""
        self.trained += 1
        return self._done()

    def skip(self) -> None:
        """Record that the oldest batch will not be trained."""
        self._done()

    def _done(self) -> LedgerEntry:
        done = self._in_flight.popleft()
        self.done_before, self.last_done = self.last_done, done
        return done

    def abandon(self) -> list[Callable[[], Fetched]]:
        """Discard the batches in flight, and return functions that give them again, in order."""
        abandoned: list[Callable[[], Fetched]] = [
            partial(_convert_entry_to_fetched, entry) for entry in self._in_flight
        ]
        self._in_flight.clear()
        self._to_transfer.clear()
        return abandoned


def _convert_entry_to_fetched(entry: LedgerEntry) -> Fetched:
    return entry.batch, entry.is_last, entry.after
