"""Rows of a batch in the caches of a module, pinned from the prefetch to the end of the backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys.dynamic.cache.row_cache import RowCache
from lightning_pipe.recsys.dynamic.cache.ticket import Ticket

Tickets = Sequence[tuple[RowCache, Ticket]]


class Counter(Protocol):
    """Counter of batches; ``RowTables`` is one."""

    trained_step: int

    def next_step(self) -> int:
        """Begin a batch and return its number."""

    def trained_up_to(self, step: int) -> None:
        """Record that the batch with this number has been trained."""

    def step_ended(self) -> None:
        """Record that all lookups of one training step have been trained."""


class BatchRows:
    """Rows pinned for a batch. They are released on garbage collection if an exception prevents :meth:`end`.

    Attributes:
        features: features of the batch with slots instead of ids.
        error: error of the prefetch.
        counter: counter of the batches.
    """

    def __init__(
        self, features: KeyedJaggedTensor | None, tickets: Tickets, counter: Counter, error: Exception | None = None
    ) -> None:
        self.features = features
        self.error = error
        self._tickets = list(tickets)
        self.counter = counter
        self._step = 0

    def begin(self) -> None:
        """Count the batch's ids, before its rows are looked up and trained."""
        self._step = self.counter.next_step()
        for cache, ticket in self._tickets:
            cache.begin(ticket, self._step)

    def show(self) -> None:
        """Restart expired rows, before a lookup without training."""
        for cache, ticket in self._tickets:
            cache.expire(ticket, self.counter.trained_step)

    def end(self, trained: bool) -> None:
        """Release the rows after training, or because they will not be trained. A second call has no effect."""
        tickets, self._tickets = self._tickets, []
        for cache, ticket in tickets:
            if trained:
                cache.trained(ticket)
            else:
                cache.discard(ticket)
        if tickets and trained:
            self.counter.trained_up_to(self._step)


def end_step(batches: Sequence[BatchRows], trained: bool) -> None:
    """End all lookups of one step, in which a module may have been called several times."""
    for rows in batches:
        rows.end(trained)
    if trained:
        for counter in {id(rows.counter): rows.counter for rows in batches}.values():
            counter.step_ended()
