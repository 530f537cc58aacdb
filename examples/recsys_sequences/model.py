"""An HSTU that guesses the item that comes next: an ordinary LightningModule around an ordinary TorchRec module."""

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
from lightning_pipe.recsys import TokenCount, token_weighted_mean

# That the module's hook is used, where the data module has none.
warnings.filterwarnings("ignore", message="You have overridden `on_before_batch_transfer` in `LightningModule`")


class SequenceRanker(pl.LightningModule):
    """Ranks items by the cosine between their embedding and what the layers make of a history.

    Args:
        width: of embeddings and layers.
        layers: how many.
        heads: of their attention.
        max_length: of a history; at least the data module's.
        dropout: in the layers.
        temperature: that cosines are divided by.
        learning_rate: peak rate of AdamW, which trains the layers.
        table_learning_rate: rate of row-wise Adagrad, which trains the tables.
        weight_decay: of AdamW.
        warmup_share: share of all steps in which the learning rate rises to its peak; it then falls linearly.
        item_rows: of the items' table.
        dynamic: tables without a size, instead: every id has a row of its own.
        store: folder of their rows.
        cache_rows: how many of each table are in memory, over all ranks.
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
            raise SetupError("dynamic tables keep their rows in a folder, and store=None; give them one of their own")
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
        """Refuses data whose histories are too long.

        Raises:
            SetupError: naming both lengths.
        """
        longest = getattr(getattr(self.trainer, "datamodule", None), "max_length", self.max_length)
        if longest > self.max_length:
            raise SetupError(
                f"the data's histories have up to {longest} ratings, and the model's max_length is {self.max_length};"
                f" needed is data.init_args.max_length of at most {self.max_length}, or more of the model's"
            )

    def on_before_batch_transfer(self, batch: HistoryBatch, dataloader_idx: int) -> HistoryBatch:
        if not self.dynamic:
            batch["sparse"] = folded(batch["sparse"], self.item_rows)
        return batch

    def training_step(self, batch: HistoryBatch, batch_idx: int) -> torch.Tensor:
        lengths = batch["sparse"]["item"].lengths()
        tokens = TokenCount((lengths - 1).clamp(min=0).sum())  # travels during the forward pass
        hidden, items, candidates = self._look(batch)
        ids = batch["sparse"]["item"].to_padded_dense()[:, 1:]
        users, others = len(lengths), batch["sparse"]["candidate"].values().view(len(lengths), 1, -1)
        queries, nexts = hidden[:, :-1], items[:, 1:]
        own = (queries * nexts).sum(-1, keepdim=True)
        against = queries @ candidates.view(users, others.shape[2], -1).transpose(1, 2)
        # What comes next is no negative of itself.
        against = against.masked_fill(others == ids[:, :, None], -torch.inf)
        losses = torch.logsumexp(torch.cat([own, against], -1) / self.temperature, -1) - own[..., 0] / self.temperature
        there = torch.arange(1, 1 + losses.shape[1], device=losses.device) < lengths[:, None]
        loss = token_weighted_mean(losses[there].sum(), tokens)
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
        """Of length one: what each position knows, the items there, both [B, N, width]; the candidates, [C, width]."""
        found = self.tables(batch["sparse"])
        item, stars = found["item"].to_padded_dense(), found["stars"].to_padded_dense()
        seconds = batch["seconds"]["seconds"].to_padded_dense()
        hidden = self.hstu(item + stars, seconds, batch["sparse"]["item"].lengths())
        return normalize(hidden, dim=-1), normalize(item, dim=-1), normalize(found["candidate"].values(), dim=-1)

    def _score(self, batch: HistoryBatch, part: Part) -> None:
        hidden, _, catalogue = self._look(batch)
        last = batch["sparse"]["item"].lengths() - 1
        query = hidden[torch.arange(len(last), device=last.device), last]
        metrics = self.scores[part]
        assert isinstance(metrics, RankingMetrics)
        metrics.update(query @ catalogue.T, batch["target"], batch["seen"], batch["weight"])
        self.log(f"{part}/hit_rate", metrics.hit_rate, prog_bar=part == "val", add_dataloader_idx=False)
        self.log(f"{part}/ndcg", metrics.ndcg, prog_bar=part == "val", add_dataloader_idx=False)
