"""The in-flight ledger: every fetched batch is fetched, in flight or trained, and is lost in none of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from lightning_pipe.loops.data.batch_source import Fetched


@dataclass(frozen=True)
class LedgerEntry:
    """One batch in flight.

    Args:
        index: position of the batch in what the loader gave since the ledger was opened, counted from 0.
        is_last: whether the loader had no more batches after it.
        batch: as it was fetched, where the ledger holds it.
        after: where the loader and the random streams were behind it; whoever knows more adds it.
    """

    index: int
    is_last: bool
    batch: Any = None
    after: dict[str, Any] = field(default_factory=dict)


class InFlightLedger(Iterator[Any]):
    """Gives batches to the pipeline and remembers those that are not trained yet, in order.

    Args:
        fetch: gives the next batch; raises ``StopIteration`` after the last.
        holds: whether to hold batches as they were fetched until they are trained, for the case that they are given up.

    Attributes:
        holds: the same, of batches to come.
        last_done: the batch that was trained or skipped last.
        done_before: the one before it.
    """

    def __init__(
        self,
        fetch: Callable[[], Fetched],
        *,
        holds: bool = False,
    ) -> None:
        self._fetch = fetch
        self.holds = holds
        self._in_flight: deque[LedgerEntry] = deque()
        self._to_transfer: deque[LedgerEntry] = deque()
        self.fetched = 0
        self.trained = 0
        self.last_done: LedgerEntry | None = None
        self.done_before: LedgerEntry | None = None

    def __next__(self) -> Any:
        batch, is_last, after = self._fetch()
        entry = LedgerEntry(self.fetched, is_last, batch if self.holds else None, after)
        self._in_flight.append(entry)
        self._to_transfer.append(entry)
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

    def next_transferred(self) -> LedgerEntry | None:
        """The batch that is to be moved to the device next; each is named once."""
        return self._to_transfer.popleft() if self._to_transfer else None

    def retire(self) -> LedgerEntry:
        """Note that the oldest batch is trained."""
        self.trained += 1
        return self._done()

    def skip(self) -> None:
        """Note that the oldest batch will never be trained."""
        self._done()

    def _done(self) -> LedgerEntry:
        done = self._in_flight.popleft()
        self.done_before, self.last_done = self.last_done, done
        return done

    def give_up(self) -> list[Callable[[], Fetched]]:
        """Note that what is in flight will not be trained; returns what gives it again, in order."""
        given_up: list[Callable[[], Fetched]] = [partial(_given, entry) for entry in self._in_flight]
        self._in_flight.clear()
        self._to_transfer.clear()
        return given_up


def _given(entry: LedgerEntry) -> Fetched:
    return entry.batch, entry.is_last, entry.after
