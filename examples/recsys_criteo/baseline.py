"""Scores to compare the model with: a model without ids, and the probabilities that generated the rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc
from torchrec.datasets.criteo import DEFAULT_INT_NAMES, DEFAULT_LABEL_NAME

from examples.recsys_criteo.data import CriteoData
from examples.recsys_criteo.generate import PROBABILITY, TRAINING, VALIDATION


def dense_only(training: Sequence[Path], validation: Sequence[Path]) -> float:
    """AUC on *validation* of a logistic regression on the 13 dense columns, fitted to *training*."""
    rows, labels = _dense(training)
    mean, scale = rows.mean(0), rows.std(0) + 1e-6
    model = nn.Linear(rows.shape[1], 1)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=50, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model((rows - mean) / scale).squeeze(1), labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    rows, labels = _dense(validation)
    with torch.no_grad():
        return binary_auroc(model((rows - mean) / scale).squeeze(1), labels.long()).item()


def best_possible(validation: Sequence[Path]) -> float | None:
    """AUC of the probabilities that generated the labels of *validation*; None for real data."""
    if any(PROBABILITY not in pq.read_schema(file).names for file in validation):
        return None
    table = pq.ParquetDataset(list(validation)).read([PROBABILITY, DEFAULT_LABEL_NAME])
    probability, label = (torch.tensor(table[name].to_numpy()) for name in (PROBABILITY, DEFAULT_LABEL_NAME))
    return binary_auroc(probability, label).item()


def _dense(files: Sequence[Path]) -> tuple[Tensor, Tensor]:
    table = pq.ParquetDataset(list(files)).read([*DEFAULT_INT_NAMES, DEFAULT_LABEL_NAME])
    columns = [torch.tensor(table[name].fill_null(0).to_numpy(), dtype=torch.float32) for name in DEFAULT_INT_NAMES]
    rows = torch.log1p(torch.stack(columns, dim=1).clamp(min=0))
    return rows, torch.tensor(table[DEFAULT_LABEL_NAME].to_numpy(), dtype=torch.float32)


class CompareScores(pl.Callback):
    """Prints the model's last AUC, and those of this module, at the end of training on generated rows."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(data, CriteoData)
        best = best_possible(data.files(VALIDATION)) if trainer.is_global_zero else None
        if best is None or "val/auroc" not in trainer.callback_metrics:
            return
        scores = {
            "logistic regression without ids": dense_only(data.files(TRAINING), data.files(VALIDATION)),
            type(pl_module).__name__: trainer.callback_metrics["val/auroc"].item(),
            "probabilities of the rows (best possible)": best,
        }
        print(f"\n{'validation rows':<44}{'AUC':>8}")
        for name, score in scores.items():
            print(f"{name:<44}{score:>8.4f}")
