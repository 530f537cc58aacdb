"""TorchRec's DLRM and DLRM with a deep cross network, in an ordinary LightningModule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import lightning.pytorch as pl
import torch
from torch import nn
from torchmetrics import MeanMetric
from torchmetrics.classification import BinaryAUROC
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, INT_FEATURE_COUNT
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad


class CriteoDLRM(pl.LightningModule):
    """Predicts clicks. This module does not depend on the pipeline or on sharding.

    Args:
        interaction: ``dlrm`` for the dot products of DLRM, ``dcn`` for the low-rank deep cross network of DLRM-DCNv2
            (default ``dlrm``).
        table_rows: number of rows of each of the 26 tables (default 10,000).
        embedding_dim: width of the tables and of the dense part's output (default 16).
        dense_layers: widths of the dense part's hidden layers (default (64,)).
        over_layers: widths of the hidden layers after the interaction (default (128, 64)).
        cross_layers: number of layers of the cross network (default 3).
        cross_rank: rank of the cross network's weights (default 64).
        learning_rate: learning rate of AdamW, which trains the dense part (default 1e-3).
        table_learning_rate: learning rate of row-wise Adagrad, which trains the tables (default 0.02).
    """

    def __init__(
        self,
        interaction: Literal["dlrm", "dcn"] = "dlrm",
        table_rows: int = 10_000,
        embedding_dim: int = 16,
        dense_layers: Sequence[int] = (64,),
        over_layers: Sequence[int] = (128, 64),
        cross_layers: int = 3,
        cross_rank: int = 64,
        learning_rate: float = 1e-3,
        table_learning_rate: float = 0.02,
    ) -> None:
        super().__init__()
        self.table_rows, self.learning_rate = table_rows, learning_rate
        tables = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=f"{key}_table",
                    num_embeddings=table_rows,
                    embedding_dim=embedding_dim,
                    feature_names=[key],
                    init_fn=partial(nn.init.normal_, std=0.01),
                )
                for key in DEFAULT_CAT_NAMES
            ]
        )
        # The tables are updated in backward, both without and under a pipeline strategy.
        apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": table_learning_rate, "eps": 1e-8})
        layers = ([*dense_layers, embedding_dim], [*over_layers, 1])
        if interaction == "dcn":
            model: DLRM = DLRM_DCN(tables, INT_FEATURE_COUNT, *layers, cross_layers, cross_rank)
        else:
            model = DLRM(tables, INT_FEATURE_COUNT, *layers)
        self.dlrm = DLRMTrain(model)
        self.mean_loss = MeanMetric()
        self.auroc = BinaryAUROC()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss, _ = self.dlrm(batch)
        self.log("train/loss", loss, prog_bar=True, batch_size=len(batch.labels))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        _, (loss, logits, labels) = self.dlrm(batch)
        self.mean_loss.update(loss, weight=len(labels))
        self.auroc.update(logits, labels.int())
        self.log("val/loss", self.mean_loss, prog_bar=True)
        self.log("val/auroc", self.auroc, prog_bar=True)

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Probabilities of a click, [B]."""
        logits: torch.Tensor = self.dlrm.model(batch.dense_features, batch.sparse_features)
        return torch.sigmoid(logits).squeeze(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
