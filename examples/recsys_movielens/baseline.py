"""Baseline for the model: the share of earlier users who liked the item."""

from __future__ import annotations

from dataclasses import dataclass

import lightning.pytorch as pl
import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy
from torchmetrics.functional.classification import binary_auroc

from examples.recsys_movielens.features import Features
from examples.recsys_movielens.files import Ratings

SMOOTHING = 5


@dataclass(frozen=True)
class Score:
    """Quality of predictions.

    Args:
        auroc: area under the receiver operating characteristic (higher is better).
        log_loss: mean negative log likelihood of the labels in nats (lower is better).
    """

    auroc: float
    log_loss: float


def item_mean(ratings: Ratings, features: Features) -> Score:
    """Score on the test part of predicting each item's share of likes in the training part.

    The share is smoothed with ``SMOOTHING`` ratings of the average share.
    """
    training = features.training_rows
    items, labels = len(ratings.release_year), features.labels.astype(np.float64)
    likes = np.bincount(ratings.item[:training], labels[:training], items)
    counts = np.bincount(ratings.item[:training], minlength=items)
    share = (likes + SMOOTHING * labels[:training].mean()) / (counts + SMOOTHING)
    guesses = torch.from_numpy(share[ratings.item[training:]])
    truth = torch.from_numpy(labels[training:])
    return Score(binary_auroc(guesses, truth.long()).item(), binary_cross_entropy(guesses, truth).item())


class CompareWithItemMean(pl.Callback):
    """Prints the model's last scores and those of the item mean on the test part, at the end of training."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = trainer.callback_metrics
        if not trainer.is_global_zero or "val/auroc" not in metrics:
            return
        baseline = trainer.datamodule.baseline  # type: ignore[attr-defined]
        model = Score(metrics["val/auroc"].item(), metrics["val/loss"].item())
        print(f"\n{'latest 20 % of the ratings':<28}{'AUROC':>8}{'log loss':>10}")
        for name, score in ((f"item mean, add-{SMOOTHING} smoothing", baseline), (type(pl_module).__name__, model)):
            print(f"{name:<28}{score.auroc:>8.4f}{score.log_loss:>10.4f}")
