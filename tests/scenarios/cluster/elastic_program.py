"""Trains an epoch: ``torchrun -m tests.scenarios.cluster.elastic_program FOLDER STEPS EVERY GATE ...``.

The last checkpoint itself says which samples its values have seen: a table has a row for each sample, to which each
visit adds one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.patience import HANG
from tests.strategies.cases import SGD, recsys

# Samples of a rank's batch.
BATCH = 4
ITEMS = 50
# Seconds that ranks wait for one that is gone without a word; nothing here takes as long between two collectives.
TIMEOUT = timedelta(seconds=float(os.environ.get("ELASTIC_TIMEOUT", str(HANG))))


def features(samples: list[int]) -> KeyedJaggedTensor:
    """The row of each sample in the table of visits, and an item for each."""
    ids = torch.tensor([*samples, *(sample * 7 % ITEMS for sample in samples)])
    return KeyedJaggedTensor(["sample", "item"], ids, lengths=torch.ones(len(ids), dtype=torch.int64))


class Visited(pl.LightningModule):
    """A small recommender, whose table ``visits`` counts."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        sizes = {"sample": samples, "item": ITEMS}
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=size, embedding_dim=4, feature_names=[name])
            for name, size in sizes.items()
        ]
        self.tables = EmbeddingBagCollection(tables)
        nn.init.zeros_(self.tables.embedding_bags["sample"].weight)
        self.top = nn.Linear(4, 1)

    def training_step(self, batch: KeyedJaggedTensor, batch_idx: int) -> Tensor:
        found = self.tables(batch)
        # Ranks average their gradients: a visit is to add one, whatever their number.
        visits = found["sample"].sum() * self.trainer.world_size
        return self.top(found["item"]).square().mean() - visits

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.top.parameters(), lr=0.1)


class Watch(Callback):
    """Notes what is trained, in the checkpoint and in files; waits where a test says so."""

    def __init__(self, folder: Path, gates: list[int], per_step: int) -> None:
        self.folder, self.gates, self.per_step = folder, gates, per_step
        self.seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        self.note(trainer, "start")

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        for number, gate in enumerate(self.gates):
            opened, told = self.folder / f"open_{number}", trainer._signal_connector.has_local_signal  # type: ignore[attr-defined]
            if self.seen >= gate and not opened.exists():
                self.note(trainer, f"gate {number}")
                while not opened.exists() and not told() and not trainer.received_sigterm:
                    time.sleep(0.02)  # a file of another process has no event

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += self.per_step
        self.note(trainer, "step")

    def note(self, trainer: pl.Trainer, what: str) -> None:
        if trainer.is_global_zero:
            line = {"what": what, "time": time.time(), "world": trainer.world_size, "step": trainer.global_step}
            with (self.folder / "log").open("a") as log:
                log.write(json.dumps({**line, "seen": self.seen}) + "\n")


def main(folder: Path, steps: int, every: int, gates: list[int]) -> None:
    torch.manual_seed(3)
    torch.set_num_threads(1)
    samples, world = steps * BATCH, int(os.environ["WORLD_SIZE"])
    module = Visited(samples)
    data: Any = DataLoader(range(samples), batch_size=BATCH, collate_fn=features, shuffle=True)  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=recsys(optimizer={**SGD, "init_args": {"lr": 1.0}}, timeout=TIMEOUT),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[
            Watch(folder, gates, BATCH * world),
            ModelCheckpoint(folder / "saved", every_n_train_steps=every, save_top_k=0, save_last=True),
            OnExceptionCheckpoint(folder / "saved"),
        ],
    )
    trainer.fit(module, data, ckpt_path="last")
    trainer.save_checkpoint(folder / "end.ckpt")


if __name__ == "__main__":
    steps, every, *gates = map(int, sys.argv[2:])
    main(Path(sys.argv[1]), steps, every, gates)
