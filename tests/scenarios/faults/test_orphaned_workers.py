"""Workers of a loader end after the rank that started them, whatever they were doing when it was killed.

A worker holds copies of its rank's sockets: while it lives, the other ranks cannot see that the rank has gone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import parent_process
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_pipe.loops.data.orphaned_workers import _PERIOD, end_workers_with_process
from lightning_pipe.strategies.pipeline import PipelineStrategy
from tests.loops.models import Net, Rows
from tests.scenarios.faults.forked_ranks import Here, Nursery, nursery, told

pytestmark = pytest.mark.exhaustive

# More than a pipe holds: the thread that sends it waits for a reader.
_LARGE = 2**20


class _WithNotes(Dataset[Any]):
    """Rows beside which a worker sends bytes through its queue, not through shared memory."""

    def __init__(self) -> None:
        self.rows = Rows(64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, bytes]:
        return self.rows[index], bytes(_LARGE)


class _Noted(Net):
    """Net on the rows of such batches, on a rank that dies at its second batch."""

    def __init__(self, dies: bool) -> None:
        super().__init__()
        self.dies = dies

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.dies and batch_idx == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch[0], batch_idx)


def _kill_the_rank(worker: int) -> None:
    """Before a worker notes which process has started it."""
    rank = parent_process()
    assert rank is not None
    os.kill(os.getppid(), signal.SIGKILL)
    rank.join()


class _Loaders(pl.LightningDataModule):
    """Of which one that is made in mid-training starts a worker that kills its rank."""

    def __init__(self, kills: bool) -> None:
        super().__init__()
        self.kills, self.made = kills, 0

    def train_dataloader(self) -> DataLoader[Tensor]:
        self.made += 1
        starts = _kill_the_rank if self.kills and self.made == 2 else None
        return DataLoader(Rows(16), 2, num_workers=1, worker_init_fn=starts, multiprocessing_context="fork")


def _trainer(here: Here, **options: Any) -> pl.Trainer:
    torch.set_num_threads(1)
    return pl.Trainer(
        accelerator="cpu",
        devices=here.world_size,
        strategy=PipelineStrategy(),
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def killed_as_a_worker_starts(here: Here) -> None:
    # When all groups of ranks are there: one that is made waits in the store, not at a socket.
    _trainer(here, reload_dataloaders_every_n_epochs=1).fit(Net(), datamodule=_Loaders(here.rank == 1))


def killed_as_a_worker_sends(here: Here) -> None:
    loader = DataLoader(_WithNotes(), 2, num_workers=1, prefetch_factor=4, multiprocessing_context="fork")
    _trainer(here).fit(_Noted(here.rank == 1), loader)


def trains_with_workers_of(here: Here, method: str) -> int:
    """With workers that live long enough to look for their rank twice."""
    loader = DataLoader(Rows(4), 2, num_workers=1, multiprocessing_context=method)
    end_workers_with_process(loader)
    batches = iter(loader)
    time.sleep(2.5 * _PERIOD)
    return len(list(batches))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Nursery]:
    with nursery(["tests.loops.models", "lightning_pipe.strategies.pipeline"]) as made:
        yield made


@pytest.mark.parametrize("fault", [killed_as_a_worker_starts, killed_as_a_worker_sends])
def test_other_ranks_notice_that_a_rank_was_killed_which_had_workers(fault: Any, ranks: Nursery) -> None:
    ended = ranks.run(fault, 2)
    assert ended[1].code == -signal.SIGKILL, told(ended)
    assert ended[0].code not in (None, 0), told(ended)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_live_as_long_as_their_rank(method: str, ranks: Nursery) -> None:
    (ended,) = ranks.run(trains_with_workers_of, 1, method)
    assert ended.value == 2, told([ended])
