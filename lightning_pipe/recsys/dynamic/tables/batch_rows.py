"""The rows that one batch holds in the caches of one module, from its prefetch to the end of its backward.

Tested in ``tests/recsys/dynamic/tables/test_sharded_tables.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys.dynamic.cache.row_cache import RowCache
from lightning_pipe.recsys.dynamic.cache.ticket import Ticket

__all__ = ["BatchRows", "Counter", "Tickets", "end_step"]

Tickets = Sequence[tuple[RowCache, Ticket]]


class Counter(Protocol):
    """What counts batches."""

    @property
    def trained_step(self) -> int:
        """Number of the batch that has been trained last."""

    def next_step(self) -> int:
        """Number of the one that begins now."""

    def trained_up_to(self, step: int) -> None:
        """The batch of this number has been trained."""

    def step_ended(self) -> None:
        """All that one training step has looked up is trained."""


class BatchRows:
    """Rows pinned for a batch. Forgotten without an end, as where an exception keeps it from training, they are let go.

    Args:
        features: the batch's features with slots in place of ids; None where the prefetch failed.
        tickets: of each cache.
        counter: of the batches of all these caches.
        error: why it failed: raised by all ranks together, before the lookup.

    Attributes:
        counter: as given.
    """

    def __init__(
        self,
        features: KeyedJaggedTensor | None,
        tickets: Tickets,
        counter: Counter,
        error: Exception | None = None,
    ) -> None:
        self.features = features
        self.error = error
        self._tickets = list(tickets)
        self.counter = counter
        self._step = 0

    def begin(self) -> None:
        """The batch's turn has come: its ids are counted, and its rows are to be looked up and trained."""
        self._step = self.counter.next_step()
        for cache, ticket in self._tickets:
            cache.begin(ticket, self._step)

    def show(self) -> None:
        """The rows are to be looked up, and not trained: rows that nobody has seen for long are new ones."""
        for cache, ticket in self._tickets:
            cache.expire(ticket, self.counter.trained_step)

    def end(self, trained: bool) -> None:
        """The rows have been trained, or will not be. Once; a second call does nothing."""
        tickets, self._tickets = self._tickets, []
        for cache, ticket in tickets:
            if trained:
                cache.trained(ticket)
            else:
                cache.discard(ticket)
        if tickets and trained:
            self.counter.trained_up_to(self._step)


def end_step(batches: Sequence[BatchRows], trained: bool) -> None:
    """Ends all that one step has looked up; a module may have been called several times in it."""
    for rows in batches:
        rows.end(trained)
    if trained:
        for counter in {id(rows.counter): rows.counter for rows in batches}.values():
            counter.step_ended()
