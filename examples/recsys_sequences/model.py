"""An HSTU that predicts the next item: an ordinary LightningModule around an ordinary TorchRec module."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn.functional import normalize

from examples.recsys_sequences.data import HistoryBatch
from examples.recsys_sequences.histories import Part
from examples.recsys_sequences.hstu import HSTU
from examples.recsys_sequences.ranking import RankingMetrics
from examples.recsys_sequences.tables import folded, make_tables
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys import GlobalTokenCount, token_weighted_mean

# The module's hook is used on purpose: the data module has none.
warnings.filterwarnings("ignore", message="You have overridden `on_before_batch_transfer` in `LightningModule`")


class SequenceRanker(pl.LightningModule):
    """Ranks items by the cosine similarity between their embedding and the hidden state of a history.

    Args:
        width: width of embeddings and layers (default 64).
        layers: number of layers (default 2).
        heads: number of attention heads (default 2).
        max_length: maximum length of a history (default 100); at least that of the data module.
        dropout: dropout probability in the layers (default 0.2).
        temperature: divisor of the cosine similarities in the loss (default 0.05).
        learning_rate: peak learning rate of AdamW, which trains the layers (default 1e-3).
        table_learning_rate: learning rate of row-wise Adagrad, which trains the tables (default 0.1).
        weight_decay: weight decay of AdamW (default 0.01).
        warmup_share: share of all steps in which the learning rate rises to its peak (default 0.1). Then it falls
            linearly.
        item_rows: number of rows of the item table of a fixed size (default 16384).
        dynamic: True for tables without a fixed size, in which every id has its own row (default False).
        store: folder for the rows of dynamic tables. Required if *dynamic* is True.
        cache_rows: rows of each dynamic table in memory, over all ranks (default 4096).
    """

    def __init__(
        self,
        width: int = 64,
        layers: int = 2,
        heads: int = 2,
        max_length: int = 100,
        dropout: float = 0.2,
        temperature: float = 0.05,
        learning_rate: float = 1e-3,
        table_learning_rate: float = 0.1,
        weight_decay: float = 0.01,
        warmup_share: float = 0.1,
        item_rows: int = 16384,
        dynamic: bool = False,
        store: str | None = None,
        cache_rows: int = 4096,
    ) -> None:
        super().__init__()
        if dynamic and store is None:
            raise SetupError("dynamic tables store their rows in a folder, got store=None. Give the path of a folder")
        self.max_length = max_length
        self.temperature = temperature
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_share = warmup_share
        self.item_rows = item_rows
        self.dynamic = dynamic
        self.tables = make_tables(
            width, cache_rows if dynamic else item_rows, table_learning_rate, store if dynamic else None
        )
        self.hstu = HSTU(layers, width, heads, max_length, dropout)
        self.scores = nn.ModuleDict({"val": RankingMetrics(), "test": RankingMetrics()})

    def setup(self, stage: str) -> None:
        """Check that the histories of the data are not too long.

        Raises:
            SetupError: the data module's ``max_length`` exceeds the model's.
        """
        longest = getattr(getattr(self.trainer, "datamodule", None), "max_length", self.max_length)
        if longest > self.max_length:
            raise SetupError(
                f"the data's histories have up to {longest} ratings, and the model's max_length is {self.max_length}."
                f" Set data.init_args.max_length to at most {self.max_length}, or increase the model's max_length"
            )

    def on_before_batch_transfer(self, batch: HistoryBatch, dataloader_idx: int) -> HistoryBatch:
        if not self.dynamic:
            batch["sparse"] = folded(batch["sparse"], self.item_rows)
        return batch

    def training_step(self, batch: HistoryBatch, batch_idx: int) -> torch.Tensor:
        lengths = batch["sparse"]["item"].lengths()
        tokens = GlobalTokenCount((lengths - 1).clamp(min=0).sum())  # its all-reduce overlaps the forward pass
        hidden, items, candidates = self._look(batch)
        ids = batch["sparse"]["item"].to_padded_dense()[:, 1:]
        users, candidate_ids = len(lengths), batch["sparse"]["candidate"].values().view(len(lengths), 1, -1)
        queries, nexts = hidden[:, :-1], items[:, 1:]
        positives = (queries * nexts).sum(-1, keepdim=True)
        negatives = queries @ candidates.view(users, candidate_ids.shape[2], -1).transpose(1, 2)
        # A candidate that equals the next item is not a negative.
        negatives = negatives.masked_fill(candidate_ids == ids[:, :, None], -torch.inf)
        losses = (
            torch.logsumexp(torch.cat([positives, negatives], -1) / self.temperature, -1)
            - positives[..., 0] / self.temperature
        )
        mask = torch.arange(1, 1 + losses.shape[1], device=losses.device) < lengths[:, None]
        loss = token_weighted_mean(losses[mask].sum(), tokens)
        self.log("train/loss", loss, prog_bar=True, batch_size=users)
        return loss

    def validation_step(self, batch: HistoryBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._score(batch, "test" if dataloader_idx else "val")

    def test_step(self, batch: HistoryBatch, batch_idx: int) -> None:
        self._score(batch, "test")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        steps = int(self.trainer.estimated_stepping_batches)
        warmup = max(1, int(self.warmup_share * steps))

        def factor(step: int) -> float:
            return min((step + 1) / warmup, max(0.02, 1 - step / steps))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _look(self, batch: HistoryBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Unit vectors of hidden states and items, both [B, N, width], and of candidates, [C, width]."""
        embeddings = self.tables(batch["sparse"])
        item, stars = embeddings["item"].to_padded_dense(), embeddings["stars"].to_padded_dense()
        seconds = batch["seconds"]["seconds"].to_padded_dense()
        hidden = self.hstu(item + stars, seconds, batch["sparse"]["item"].lengths())
        return normalize(hidden, dim=-1), normalize(item, dim=-1), normalize(embeddings["candidate"].values(), dim=-1)

    def _score(self, batch: HistoryBatch, part: Part) -> None:
        hidden, _, catalog = self._look(batch)
        last = batch["sparse"]["item"].lengths() - 1
        query = hidden[torch.arange(len(last), device=last.device), last]
        metrics = self.scores[part]
        assert isinstance(metrics, RankingMetrics)
        metrics.update(query @ catalog.T, batch["target"], batch["seen"], batch["weight"])
        self.log(f"{part}/hit_rate", metrics.hit_rate, prog_bar=part == "val", add_dataloader_idx=False)
        self.log(f"{part}/ndcg", metrics.ndcg, prog_bar=part == "val", add_dataloader_idx=False)
