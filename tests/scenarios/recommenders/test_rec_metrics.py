"""TorchRec's metrics in a LightningModule: over all ranks, across checkpoints, and as a reason to stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from examples.recsys_criteo.metrics import ClickMetrics
from tests.distributed import run_ranks
from tests.strategies import cases

BATCH, WINDOW = 4, 8
Rows = tuple[list[float], list[float]]  # logits and labels


class Measured(pl.LightningModule):
    """Measures each training batch, and each validation, and remembers the rows."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=key, num_embeddings=cases.IDS, embedding_dim=4, feature_names=[key])
            for key in cases.KEYS
        ]
        self.tables, self.top = EmbeddingBagCollection(tables), nn.Linear(4 * len(cases.KEYS), 1)
        self.rows: list[Rows] = []
        self.validated: list[list[Rows]] = []
        self.values: list[dict[str, float]] = []
        self.scores: list[float] = []

    def setup(self, stage: str) -> None:
        self.training_metrics = ClickMetrics(BATCH, self.global_rank, self.trainer.world_size, WINDOW)
        self.validation_metrics = ClickMetrics(BATCH, self.global_rank, self.trainer.world_size, WINDOW)

    def logits(self, batch: cases.Batch) -> Tensor:
        return self.top(self.tables(batch.sparse).values()).squeeze(1)

    def training_step(self, batch: cases.Batch, batch_idx: int) -> Tensor:
        logits = self.logits(batch)
        self.training_metrics.update(logits, batch.label)
        self.rows.append((logits.tolist(), batch.label.tolist()))
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.label)

    def on_train_batch_end(self, *args: Any) -> None:
        self.values.append({name: value.item() for name, value in self.training_metrics.compute().items()})

    def on_train_epoch_end(self) -> None:
        self.training_metrics.reset()

    def on_validation_epoch_start(self) -> None:
        self.validation_metrics.reset()
        self.validated.append([])

    def validation_step(self, batch: cases.Batch, batch_idx: int) -> None:
        logits = self.logits(batch)
        self.validation_metrics.update(logits, batch.label)
        self.validated[-1].append((logits.tolist(), batch.label.tolist()))

    def on_validation_epoch_end(self) -> None:
        score = self.validation_metrics.compute()["lifetime_ne"]
        self.scores.append(score.item())
        self.log("val/ne", score, sync_dist=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["training_metrics"] = self.training_metrics.states_of_ranks()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.training_metrics.load_states_of_ranks(checkpoint["training_metrics"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.top.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return cases.loader(24, BATCH, in_order=True)

    def val_dataloader(self) -> Any:
        return cases.loader(20, BATCH)


def by_hand(batches: list[Rows]) -> dict[str, float]:
    """Normalized entropy and calibration of rows, with NumPy."""
    logits, labels = (np.concatenate([batch[part] for batch in batches]) for part in (0, 1))
    predicted, mean = 1 / (1 + np.exp(-logits)), labels.mean()
    entropy = -(labels * np.log2(predicted) + (1 - labels) * np.log2(1 - predicted)).mean()
    of_mean = -(mean * np.log2(mean) + (1 - mean) * np.log2(1 - mean))
    return {"ne": entropy / of_mean, "calibration": predicted.sum() / labels.sum()}


def fit(module: Measured, ckpt_path: Path | None = None, **options: Any) -> pl.Trainer:
    pl.seed_everything(1)
    used = cases.trainer(cases.recsys(), num_sanity_val_steps=0, **options)
    used.fit(module, ckpt_path=ckpt_path)
    return used


def measured(rank: int, size: int, folder: Path) -> Any:
    """A run of two epochs, and runs from each of its checkpoints."""
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, enable_version_counter=False)
    whole = Measured()
    fit(whole, callbacks=[saves], enable_checkpointing=True)
    continued = {}
    for step in range(1, len(whole.values)):
        module = Measured()
        fit(module, folder / f"step={step}.ckpt")
        continued[step] = module.values
    names = [name for name in whole.state_dict() if "metrics" in name]
    return whole.rows, whole.values, whole.validated, whole.scores, continued, names


def test_values_are_those_of_all_ranks_since_the_start_of_the_epoch_also_in_continued_runs(tmp_path: Path) -> None:
    ranks = run_ranks(measured, 2, tmp_path)
    steps = 24 // BATCH // 2
    values = ranks[0][1]
    assert len(values) == 2 * steps
    for rows, of_rank, validated, scores, continued, names in ranks:
        assert names == []
        assert of_rank == values
        assert scores == ranks[0][3]
        for step, found in continued.items():
            assert len(found) == len(values) - step
            for one, other in zip(found, values[step:], strict=True):
                for name in ("lifetime_ne", "lifetime_calibration"):
                    assert one[name] == other[name]  # to the bit
        assert len(validated) == len(scores) == 2
        assert len(rows) == 2 * steps
    for step, found in enumerate(values):
        seen = [batch for one in ranks for batch in one[0][step // steps * steps : step + 1]]
        latest = [batch for one in ranks for batch in one[0][step // steps * steps : step + 1][-WINDOW // BATCH :]]
        for prefix, batches in (("lifetime", seen), ("window", latest)):
            for name, value in by_hand(batches).items():
                assert found[f"{prefix}_{name}"] == pytest.approx(value, rel=1e-6), (step, prefix, name)
    for number, score in enumerate(ranks[0][3]):
        batches = [batch for one in ranks for batch in one[2][number]]
        assert sum(len(labels) for _, labels in batches) == 20
        assert score == pytest.approx(by_hand(batches)["ne"], rel=1e-6)


class Worse(Measured):
    """Becomes worse with each epoch."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.top.parameters(), lr=0.5, maximize=True)


def stopped(rank: int, size: int, options: dict[str, Any]) -> Any:
    stop = EarlyStopping("val/ne", mode="min", patience=2)
    module = Worse()
    used = fit(module, callbacks=[stop], max_epochs=20, **options)
    return used.global_step, stop.best_score.item(), module.scores


def test_all_ranks_stop_after_the_same_batch() -> None:
    every = 2
    ends = run_ranks(stopped, 2, {"val_check_interval": every, "check_val_every_n_epoch": None})
    assert all(end == ends[0] for end in ends)
    steps, best, scores = ends[0]
    assert best == pytest.approx(min(scores), rel=1e-6)
    # The two validations after the best one were not better, and no batch followed them.
    assert len(scores) == int(np.argmin(scores)) + 3 < 20
    assert steps == len(scores) * every
