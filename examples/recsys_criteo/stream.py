"""Batches of an endless stream in partitions, whose position is a part of each checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader


class StreamBatches(IterableDataset[Any]):
    """Reads partitions in turn, one batch each; each rank and worker process reads its own partitions.

    The order of batches does not depend on the time at which rows arrive, because a partition without enough rows is
    waited for.

    Args:
        read: function of a partition, an offset and a number of rows. It returns the rows from this offset on, fewer if
            the partition has no more yet.
        partitions: number of partitions, at least the number of ranks times worker processes.
        collate: function from rows to a batch.
        batch_size: number of rows of a batch.
        rank: this rank, from the trainer.
        ranks: number of ranks.
        wait: time between two attempts to read, in seconds (default 0.5).
    """

    def __init__(
        self,
        read: Callable[[int, int, int], Any],
        partitions: int,
        collate: Callable[[Any], Any],
        batch_size: int,
        rank: int = 0,
        ranks: int = 1,
        wait: float = 0.5,
    ) -> None:
        self.read, self.collate, self.batch_size, self.wait = read, collate, batch_size, wait
        self.rank, self.ranks = rank, ranks
        self.offsets = [0] * partitions  # number of rows already read of each partition
        self.turn = 0  # number of batches already read

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        partitions = range(self.rank * workers + number, len(self.offsets), self.ranks * workers)
        if not partitions:
            raise ValueError(
                f"{len(self.offsets)} partitions do not suffice for {self.ranks} ranks x {workers} workers"
            )
        while True:
            partition = partitions[self.turn % len(partitions)]
            rows = self.read(partition, self.offsets[partition], self.batch_size)
            if len(rows) < self.batch_size:
                time.sleep(self.wait)
                continue
            self.offsets[partition] += self.batch_size
            self.turn += 1
            yield self.collate(rows)

    def state_dict(self) -> dict[str, Any]:
        return {"offsets": list(self.offsets), "turn": self.turn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.offsets, self.turn = list(state["offsets"]), state["turn"]


class EndlessLoader:
    """Loader of one endless pass: an epoch that ends early does not restart it.

    A ``StatefulDataLoader`` with worker processes would read the stream from its beginning in each epoch.

    Args:
        loader: loader of an endless dataset.
    """

    def __init__(self, loader: StatefulDataLoader) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self._loader)
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)
        self._batches = None


def loader(batches: StreamBatches, workers: int = 0) -> EndlessLoader:
    """Loader of *batches*, whose position is a part of each checkpoint."""
    return EndlessLoader(StatefulDataLoader(batches, batch_size=None, num_workers=workers))
