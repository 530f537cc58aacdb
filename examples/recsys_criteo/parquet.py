"""Batches from Parquet files, which a run continues within an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader


class ParquetBatches(IterableDataset[Any]):
    """Reads row groups in another order in each epoch; each rank and worker process reads its own.

    Args:
        files: Parquet files, the same on all ranks. Together they need at least as many row groups as there are ranks
            times worker processes. All ranks get the same number of batches if the groups have equal sizes and their
            number is a multiple of the ranks.
        columns: columns to read.
        collate: function from a table to a batch.
        batch_size: number of rows of a batch. The last batch of a row group can be smaller.
        rank: this rank, from the trainer.
        ranks: number of ranks.
        seed: seed of the order.
    """

    def __init__(
        self,
        files: Sequence[Path],
        columns: Sequence[str],
        collate: Callable[[Any], Any],
        batch_size: int,
        rank: int = 0,
        ranks: int = 1,
        seed: int = 0,
    ) -> None:
        self.groups = [(file, group) for file in files for group in range(pq.ParquetFile(file).num_row_groups)]
        self.columns, self.collate, self.batch_size = list(columns), collate, batch_size
        self.rank, self.ranks, self.seed = rank, ranks, seed
        self.epoch = self.group = self.batch = 0  # what is read next: the batch of the group of the epoch
        self._resumed = False

    def __iter__(self) -> Iterator[Any]:
        if not self._resumed and (self.group or self.batch):
            # The previous iteration was abandoned, for example after Lightning's sanity check.
            self.epoch, self.group, self.batch = self.epoch + 1, 0, 0
        self._resumed = False
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.groups))
        row_groups = order[self.rank * workers + number :: self.ranks * workers]
        if not len(row_groups):
            raise ValueError(f"{len(order)} row groups do not suffice for {self.ranks} ranks x {workers} workers")
        while self.group < len(row_groups):
            file, group = self.groups[row_groups[self.group]]
            table = pq.ParquetFile(file).read_row_group(group, self.columns)
            starts = range(0, len(table), self.batch_size)
            while self.batch < len(starts):
                start = starts[self.batch]
                self.batch += 1
                yield self.collate(table.slice(start, self.batch_size))
            self.group, self.batch = self.group + 1, 0
        self.epoch, self.group = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "group": self.group, "batch": self.batch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.group, self.batch = state["epoch"], state["group"], state["batch"]
        self._resumed = True


def loader(batches: ParquetBatches, workers: int = 0) -> StatefulDataLoader:
    """Loader of *batches*, whose position is a part of each checkpoint."""
    # Workers that end with each epoch would begin each with the same order.
    return StatefulDataLoader(batches, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
