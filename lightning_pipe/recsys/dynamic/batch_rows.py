"""The rows that one batch holds in the caches of one module, from its prefetch to the end of its backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys.dynamic.row_cache import RowCache, Ticket

__all__ = ["BatchRows"]


class BatchRows:
    """Rows pinned for a batch.

    Dropped without an end, as with a batch that an exception kept from training, it lets go of them by itself.

    Args:
        features: the batch's features with slots in place of ids; None where the prefetch failed.
        tickets: of each cache.
        error: why it failed: raised by all ranks together, before the lookup.
        on_end: called after training or letting go.
    """

    def __init__(
        self,
        features: KeyedJaggedTensor | None,
        tickets: Sequence[tuple[RowCache, Ticket]],
        error: Exception | None = None,
        on_end: Callable[[bool], None] | None = None,
    ) -> None:
        self.features = features
        self.error = error
        self._tickets = list(tickets)
        self._on_end = on_end

    def begin(self) -> None:
        """The batch's turn has come: its ids are counted, and its rows are to be looked up and trained."""
        for cache, ticket in self._tickets:
            cache.begin(ticket)

    def end(self, trained: bool) -> None:
        """The rows have been trained, or will not be. Once; a second call does nothing."""
        tickets, self._tickets = self._tickets, []
        for cache, ticket in tickets:
            if trained:
                cache.trained(ticket)
            else:
                cache.discard(ticket)
        if tickets and self._on_end is not None:
            self._on_end(trained)

    def __del__(self) -> None:
        for cache, ticket in self.__dict__.get("_tickets", ()):
            cache.discard(ticket)
