"""DLRM on MovieLens-100K: an ordinary LightningModule around an ordinary TorchRec model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from examples.recsys_movielens.features import DENSE_KEYS, HISTORY_KEYS, TABLE_ROWS


class MovieLensDLRM(pl.LightningModule):
    """Predicts whether a user likes an item. This module does not depend on the pipeline or on sharding.

    Args:
        embedding_dim: width of every table and of the dense part's output (default 16).
        dense_layers: widths of the dense part's hidden layers (default (64,)).
        over_layers: widths of the hidden layers after the interaction of all features (default (128, 64)).
        learning_rate: peak learning rate of AdamW, which trains the dense part (default 5e-4).
        table_learning_rate: learning rate of row-wise Adagrad, which trains the tables (default 5e-3).
        warmup_share: share of all steps in which the learning rate rises to its peak (default 0.1). Then it falls
            linearly.
    """

    def __init__(
        self,
        embedding_dim: int = 16,
        dense_layers: Sequence[int] = (64,),
        over_layers: Sequence[int] = (128, 64),
        learning_rate: float = 5e-4,
        table_learning_rate: float = 5e-3,
        warmup_share: float = 0.1,
    ) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.warmup_share = warmup_share
        tables = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=f"{key}_table",
                    num_embeddings=rows,
                    embedding_dim=embedding_dim,
                    # The history's items share the candidate's table, so that the interaction compares them.
                    feature_names=[key, *HISTORY_KEYS] if key == "item" else [key],
                    init_fn=partial(nn.init.normal_, std=0.01),
                )
                for key, rows in TABLE_ROWS.items()
            ]
        )
        # The tables are updated in backward, both without and under a pipeline strategy.
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": table_learning_rate, "eps": 1e-8})
        self.dlrm = DLRMTrain(
            DLRM(tables, len(DENSE_KEYS), [*dense_layers, embedding_dim], [*over_layers, 1]),
        )
        self.mean_loss = MeanMetric()
        self.auroc = BinaryAUROC()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss, _ = self.dlrm(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._score(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._score(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Probability that the user likes the item, [B]."""
        _, (_, logits, _) = self.dlrm(batch)
        return torch.sigmoid(logits)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        warmup = max(1, int(self.warmup_share * steps))

        def factor(step: int) -> float:
            return min((step + 1) / warmup, max(0.02, 1 - step / steps))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _score(self, batch: Batch, part: str) -> None:
        _, (loss, logits, labels) = self.dlrm(batch)
        self.mean_loss.update(loss, weight=len(labels))
        self.auroc.update(logits, labels.int())
        self.log(f"{part}/loss", self.mean_loss, prog_bar=True)
        self.log(f"{part}/auroc", self.auroc, prog_bar=True)
