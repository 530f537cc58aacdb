"""The rows that one batch holds in the caches of one module, from its prefetch to the end of its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys.dynamic.row_cache import RowCache
from lightning_pipe.recsys.dynamic.ticket import Ticket

__all__ = ["BatchRows", "Counter", "Tickets"]

Tickets = Sequence[tuple[RowCache, Ticket]]


class Counter(Protocol):
    """What counts batches."""

    @property
    def step(self) -> int:
        """Number of the batch that has begun last."""

    def next_step(self) -> int:
        """Number of the one that begins now."""

    def one_trained(self) -> None:
        """A batch has been trained."""


class BatchRows:
    """Rows pinned for a batch. Forgotten without an end, as where an exception keeps it from training, they are let go.

    Args:
        features: the batch's features with slots in place of ids; None where the prefetch failed.
        tickets: of each cache.
        counter: of the batches of all these caches.
        error: why it failed: raised by all ranks together, before the lookup.
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
        self._counter = counter

    def begin(self) -> None:
        """The batch's turn has come: its ids are counted, and its rows are to be looked up and trained."""
        step = self._counter.next_step()
        for cache, ticket in self._tickets:
            cache.begin(ticket, step)

    def show(self) -> None:
        """The rows are to be looked up, and not trained: rows that nobody has seen for long are new ones."""
        for cache, ticket in self._tickets:
            cache.expire(ticket, self._counter.step)

    def end(self, trained: bool) -> None:
        """The rows have been trained, or will not be. Once; a second call does nothing."""
        tickets, self._tickets = self._tickets, []
        for cache, ticket in tickets:
            if trained:
                cache.trained(ticket)
            else:
                cache.discard(ticket)
        if tickets and trained:
            self._counter.one_trained()
