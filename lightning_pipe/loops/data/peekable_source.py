"""Source of batches that can show the dataloader of its next batch, and an iterator over one dataloader's batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lightning_pipe.loops.data.batch_source import BatchSource, Fetched, get_fetched_batch


class PeekableBatchSource:
    """Source of batches that can read the next batch without returning it."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self._next: Fetched | None = None
        self._ended = False

    @property
    def knows_next(self) -> bool:
        """True if the next batch has been read, or if no batches are left."""
        return self._ended or self._next is not None

    def peek_dataloader_idx(self) -> int:
        """Return the index of the next batch's dataloader. Raises ``StopIteration`` if no batches are left."""
        if self._ended:
            raise StopIteration
        if self._next is None:
            try:
                self._next = self._source()
            except StopIteration:
                self._ended = True
                raise
        return get_dataloader_idx(self._next)

    def take(self) -> Fetched:
        assert self._next is not None
        fetched, self._next = self._next, None
        return fetched

    def get_undelivered_batches(self) -> list[Callable[[], Fetched]]:
        """Return functions that give the batches that were fetched and not taken, in order."""
        looked_at = [] if self._next is None else [partial(get_fetched_batch, self._next)]
        return [*looked_at, *self._source.get_undelivered_batches()]

    def close(self) -> None:
        self._source.close()


class SingleDataloaderIterator(Iterator[Any]):
    """Iterator over the batches of one dataloader. If their number is known, no batch of the next one is read."""

    def __init__(
        self, source: PeekableBatchSource, loader: int, batches: int | float | None, take: Callable[[Fetched], Any]
    ) -> None:
        self._source = source
        self._loader = loader
        self._remaining = batches
        self._take = take

    def __next__(self) -> Any:
        if self._remaining == 0 or self._source.peek_dataloader_idx() != self._loader:
            raise StopIteration
        if self._remaining is not None:
            self._remaining -= 1
        return self._take(self._source.take())


def get_dataloader_idx(fetched: Fetched) -> int:
    """Return the index of the dataloader of a batch."""
    index: int = fetched[2]["dataloader_idx"]
    return index
