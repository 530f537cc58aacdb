"""An endless stream: a run continues at the offsets of its checkpoint, to the bit, wherever it was stopped."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from examples.recsys_criteo.stream import StreamBatches, loader
from tests.data.reading_cases import COLLATE, Users
from tests.distributed import run_ranks
from tests.strategies.cases import recsys, trainer
from tests.tiers import sampled_rows

PARTITIONS, LENGTH, BATCH, STEPS = 12, 60, 4, 11
# How the run is divided: one endless epoch, or epochs of four batches.
DIVISIONS: dict[str, dict[str, Any]] = {
    "one epoch": {},
    "epochs of 4": {"limit_train_batches": 4, "max_epochs": -1},
}


def row(partition: int, offset: int) -> dict[str, Any]:
    """Row of a partition; its user tells where it is from."""
    source = np.random.default_rng((partition, offset))
    return {
        "user": partition * LENGTH + offset,
        "genres": source.integers(0, 30, source.integers(0, 4)).tolist(),
        "age": float(source.random()),
        "label": int(source.integers(0, 2)),
    }


class Growing:
    """A log whose partitions get another row at each attempt to read them."""

    def __init__(self) -> None:
        self.length = 0

    def __call__(self, partition: int, offset: int, count: int) -> list[dict[str, Any]]:
        self.length += 1
        return [row(partition, one) for one in range(offset, min(offset + count, self.length))]


class Batches(Dataset[Any]):
    """Two batches for validation."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return COLLATE([row(partition, index) for partition in range(4)])


class Streamed(Users):
    """As `Users`, with validations between its batches."""

    def val_dataloader(self) -> Any:
        return DataLoader(Batches(), batch_size=None)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.tables(batch.sparse_features)


def read(workers: int, rank: int, ranks: int) -> Any:
    return loader(StreamBatches(Growing(), PARTITIONS, COLLATE, BATCH, rank, ranks, wait=0), workers)


def runs(rank: int, size: int, workers: int, division: str, folder: Path) -> dict[str, Any]:
    """Users and losses of a whole run, and of runs from checkpoints, by the checkpoints' names."""

    def run(steps: int, checkpoint: str | None = None, last: str = "last") -> list[Any]:
        pl.seed_everything(1)
        saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, enable_version_counter=False)
        module = Streamed(partial(read, workers), PARTITIONS * LENGTH)
        used = trainer(
            recsys(),
            callbacks=[saves],
            enable_checkpointing=True,
            max_steps=steps,
            check_val_every_n_epoch=None,
            val_check_interval=4,
            **DIVISIONS[division],
        )
        used.fit(module, ckpt_path=folder / f"{checkpoint}.ckpt" if checkpoint else None)
        used.save_checkpoint(folder / f"{last}.ckpt")
        return module.seen

    found = {"whole": run(STEPS)}
    for step in (2, 4, 7):
        found[f"step={step}"] = run(STEPS, f"step={step}")
    # A run that has ended at its max_steps is continued with more steps.
    found["ended"] = run(6, last="ended") and run(STEPS, "ended")
    return found


@pytest.mark.parametrize(
    ("ranks", "workers", "division"),
    sampled_rows(
        [(ranks, workers, division) for ranks, workers in ((1, 0), (2, 2)) for division in DIVISIONS],
        lambda case: case != (2, 2, "epochs of 4"),
    ),
)
def test_a_run_continues_at_the_offsets_of_its_checkpoint_to_the_bit(
    tmp_path: Path, ranks: int, workers: int, division: str
) -> None:
    of_ranks = run_ranks(runs, ranks, workers, division, tmp_path)
    for rank, found in enumerate(of_ranks):
        whole = found["whole"]
        for step in (2, 4, 7):
            assert found[f"step={step}"] == whole[step:], step
        assert found["ended"] == whole[6:]
        # Each partition is read by one worker process, from its first row on, and no row is left out.
        readers = max(workers, 1)
        shares = [list(range(rank * readers + one, PARTITIONS, ranks * readers)) for one in range(readers)]
        for step, (users, _) in enumerate(whole):
            own, turn = shares[step % readers], step // readers
            start = own[turn % len(own)] * LENGTH + turn // len(own) * BATCH
            assert users == list(range(start, start + BATCH)), step
