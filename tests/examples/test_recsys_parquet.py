"""Rows of Parquet files: each is read once an epoch by one rank, and a run continues within an epoch to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from examples.recsys_criteo.parquet import ParquetBatches, loader
from lightning_pipe.data import JaggedCollator
from tests.distributed import run_ranks
from tests.strategies.cases import recsys, trainer
from tests.tiers import sampled

COLUMNS = ["user", "genres", "age", "label"]
FILES, GROUPS, ROWS = 3, 4, 20  # row groups of a file, and rows of a group


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, source = tmp_path_factory.mktemp("rows"), np.random.default_rng(0)
    for file in range(FILES):
        size = GROUPS * ROWS
        rows = {
            "user": np.arange(size) + file * size,  # names the row
            "genres": [source.integers(0, 30, source.integers(0, 4)).tolist() for _ in range(size)],
            "age": source.random(size),
            "label": source.integers(0, 2, size),
        }
        pq.write_table(pa.table(rows), folder / f"{file}.parquet", row_group_size=ROWS)
    return sorted(folder.iterdir())


def batches_of(files: list[Path], rank: int = 0, ranks: int = 1) -> ParquetBatches:
    return ParquetBatches(files, COLUMNS, JaggedCollator(["user", "genres"], ["age"]), 8, rank, ranks)


class Users(pl.LightningModule):
    """Remembers the users of each batch and its loss."""

    def __init__(self, files: list[Path], workers: int) -> None:
        super().__init__()
        self.files, self.workers = files, workers
        self.seen: list[tuple[list[int], float]] = []
        tables = {"user": FILES * GROUPS * ROWS, "genres": 30}
        self.tables = EmbeddingBagCollection(
            [EmbeddingBagConfig(name=f"of_{key}", num_embeddings=rows, embedding_dim=4, feature_names=[key])
             for key, rows in tables.items()]
        )  # fmt: skip
        self.top = nn.Linear(9, 1)

    def train_dataloader(self) -> Any:
        return loader(batches_of(self.files, self.global_rank, self.trainer.world_size), self.workers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = torch.cat([self.tables(batch.sparse_features).values(), batch.dense_features], dim=1)
        loss = nn.functional.binary_cross_entropy_with_logits(self.top(rows).squeeze(1), batch.labels)
        self.seen.append((batch.sparse_features["user"].values().tolist(), loss.item()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.top.parameters(), lr=0.1)


def trained(rank: int, size: int, files: list[Path], workers: int, folder: Path) -> dict[str, Any]:
    """What a run of two epochs sees and what runs see that resume from its checkpoints."""
    found = {}
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=7, save_top_k=-1, enable_version_counter=False)
    checkpoints: list[Path | None] = [None]
    for checkpoint in checkpoints:
        pl.seed_everything(1)
        module = Users(files, workers)
        callbacks = [saves] if checkpoint is None else []
        used = trainer(recsys(), max_epochs=2, callbacks=callbacks, enable_checkpointing=checkpoint is None)
        used.fit(module, ckpt_path=checkpoint)
        found["whole" if checkpoint is None else checkpoint.stem] = module.seen
        if checkpoint is None:
            checkpoints += [folder / f"step={step}.ckpt" for step in range(7, used.global_step, 7)]
    return found


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", sampled([1, 2, 3], lambda ranks: ranks == 1))
def test_a_run_continues_within_an_epoch_to_the_bit(
    files: list[Path], tmp_path: Path, ranks: int, workers: int
) -> None:
    of_ranks = run_ranks(trained, ranks, files, workers, tmp_path)
    epochs: list[list[int]] = [[], []]
    for found in of_ranks:
        whole = found.pop("whole")
        assert len(found) >= 3
        for name, seen in found.items():
            assert seen == whole[int(name.partition("=")[2]) :]
        for epoch, half in enumerate((whole[: len(whole) // 2], whole[len(whole) // 2 :])):
            epochs[epoch] += [user for users, _ in half for user in users]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(FILES * GROUPS * ROWS))
    assert epochs[0] != epochs[1]  # another order
