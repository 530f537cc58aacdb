"""A byte-level transformer as an ``nn.Sequential``, with dropout."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lightning_pipe.pipe import compute_pipe_or_module_loss

BYTES = 256


class Embed(nn.Module):
    """Embeddings of bytes and positions."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, width)
        self.places = nn.Embedding(length, width)

    def forward(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self.bytes(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return embedded


class Layer(nn.TransformerEncoderLayer):
    """Transformer layer with causal attention."""

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        length = hidden.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=hidden.device, dtype=hidden.dtype)
        return super().forward(hidden, src_mask=mask, is_causal=True)


class ByteTransformer(pl.LightningModule):
    """Predicts the next byte.

    Args:
        width: embedding width (default 128).
        layers: number of layers (default 4).
        heads: number of attention heads (default 4).
        length: maximum length of a row in bytes (default 128).
        dropout: dropout probability (default 0.1).
        learning_rate: learning rate of AdamW (default 2e-3).
    """

    def __init__(
        self,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        length: int = 128,
        dropout: float = 0.1,
        learning_rate: float = 2e-3,
    ) -> None:
        super().__init__()
        self.model = nn.Sequential(
            Embed(width, length),
            *(Layer(width, heads, 4 * width, dropout, batch_first=True, norm_first=True) for _ in range(layers)),
            nn.LayerNorm(width),
            nn.Linear(width, BYTES),
        )
        self.learning_rate = learning_rate

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = compute_pipe_or_module_loss(self.model, batch["input_ids"], batch["labels"], cross_entropy)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = cross_entropy(self.model(batch["input_ids"]), batch["labels"])
        self.log("val_loss", loss, prog_bar=True, batch_size=len(batch["labels"]))

    def place_batch(self, batch: dict[str, Tensor], devices: list[torch.device]) -> dict[str, Tensor]:
        """Move the input to the first device, and the labels to the last one, which computes the loss."""
        return {"input_ids": batch["input_ids"].to(devices[0]), "labels": batch["labels"].to(devices[-1])}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over all bytes."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
