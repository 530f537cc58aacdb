"""Baseline for the model: predicts the next byte from the previous one."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor


def bigram_cross_entropy(training: Tensor, validation: Tensor) -> float:
    """Cross-entropy of *validation* in nats per byte, under bigram counts of *training* with add-one smoothing."""
    pairs = training[:-1].long() * 256 + training[1:].long()
    counts = torch.bincount(pairs, minlength=256 * 256).view(256, 256).double() + 1
    log_probabilities = (counts / counts.sum(dim=1, keepdim=True)).log()
    return -log_probabilities[validation[:-1].long(), validation[1:].long()].mean().item()


class CompareWithBigrams(pl.Callback):
    """Prints the validation loss at the end, with the loss of bigrams counted in the training text."""

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        val_loss = trainer.callback_metrics.get("val_loss")
        if trainer.is_global_zero and val_loss is not None:
            bigrams = bigram_cross_entropy(data.training_text, data.validation_text)
            print(f"Validation cross-entropy in nats per byte: model {val_loss:.3f}, bigrams {bigrams:.3f}")
