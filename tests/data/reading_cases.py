"""A run over rows that name themselves, and runs that continue it from each of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from lightning_pipe.data import JaggedCollator
from tests.strategies.cases import recsys, trainer

COLUMNS = ["user", "genres", "age", "label"]
# From a rank and the number of ranks to its loader, of batches of COLLATE; the user of a row is its number.
Loaders = Callable[[int, int], Any]
COLLATE = JaggedCollator(["user", "genres"], ["age"])


class Users(pl.LightningModule):
    """Remembers the users of each batch and its loss."""

    def __init__(self, loaders: Loaders, rows: int) -> None:
        super().__init__()
        self.loaders, self.seen = loaders, list[tuple[list[int], float]]()
        tables = [
            EmbeddingBagConfig(name=f"of_{key}", num_embeddings=size, embedding_dim=4, feature_names=[key])
            for key, size in (("user", rows), ("genres", 30))
        ]
        self.tables = EmbeddingBagCollection(tables)
        self.top = nn.Linear(9, 1)

    def train_dataloader(self) -> Any:
        return self.loaders(self.global_rank, self.trainer.world_size)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows = torch.cat([self.tables(batch.sparse_features).values(), batch.dense_features], dim=1)
        loss = nn.functional.binary_cross_entropy_with_logits(self.top(rows).squeeze(1), batch.labels)
        self.seen.append((batch.sparse_features["user"].values().tolist(), loss.item()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.top.parameters(), lr=0.1)


def seen_by_runs(rank: int, size: int, loaders: Loaders, rows: int, every: int, folder: Path) -> dict[int, Any]:
    """What is seen by a run of two epochs (0), and by runs from its checkpoints, by their steps."""
    found: dict[int, Any] = {}
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=every, save_top_k=-1, enable_version_counter=False)
    steps = [0]
    for step in steps:
        pl.seed_everything(1)
        module = Users(loaders, rows)
        used = trainer(recsys(), max_epochs=2, callbacks=[] if step else [saves], enable_checkpointing=step == 0)
        used.fit(module, ckpt_path=folder / f"step={step}.ckpt" if step else None)
        found[step] = module.seen
        if step == 0:
            steps += range(every, used.global_step, every)
    return found


def check(of_ranks: list[dict[int, Any]], rows: int) -> list[list[int]]:
    """Every run sees what the whole run saw from there on, and each epoch has each row once. Returns the epochs."""
    epochs: list[list[int]] = [[], []]
    for found in of_ranks:
        whole = found.pop(0)
        assert len(found) >= 3
        for step, seen in found.items():
            assert seen == whole[step:], step
        half = len(whole) // 2
        for epoch, part in zip(epochs, (whole[:half], whole[half:]), strict=True):
            epoch += [user for users, _ in part for user in users]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(rows))
    return epochs
