"""A click model over dynamic tables, and batches of ids by Zipf's law."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys import DynamicEmbeddingBagCollection, DynamicTable

USERS, ITEMS = 20_000, 300_000  # rows of the tables
_CACHED = 20  # a table's cache holds one row in so many
_WIDTH = 64
_HISTORY = 8  # items that a user has seen, in each row of a batch
_BATCH = 512
_ZIPF = 1.05

Batch = dict[str, Any]


class ClickModel(pl.LightningModule):
    """Scores a user, an item and the user's history. This module does not depend on the pipeline.

    Args:
        store: folder for the rows.
    """

    def __init__(self, store: Path) -> None:
        super().__init__()
        tables = [
            DynamicTable(name=name, embedding_dim=_WIDTH, feature_names=features, cache_rows=rows // _CACHED)
            for name, rows, features in (("user", USERS, ["user"]), ("item", ITEMS, ["item", "history"]))
        ]
        self.tables = DynamicEmbeddingBagCollection(tables, store, seed=1, existing_rows="keep", direct_reads=True)
        self.dense = nn.Sequential(
            nn.Linear(3 * _WIDTH, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU()
        )
        self.score = nn.Linear(1024, 1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scores = self.score(self.dense(self.tables(batch["ids"]).values())).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch["clicked"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.dense.parameters(), *self.score.parameters()], lr=0.01)


def draw_batches(number: int) -> list[Batch]:
    """Batches whose ids follow Zipf's law; the same ones in each call."""
    draw = np.random.default_rng(1)
    users, items = _cumulative_zipf(USERS), _cumulative_zipf(ITEMS)
    batches = []
    for _ in range(number):
        user = np.searchsorted(users, draw.random(_BATCH))
        item = np.searchsorted(items, draw.random(_BATCH * (1 + _HISTORY)))
        batches.append(_make_batch(user, item[:_BATCH], item[_BATCH:], draw.integers(2, size=_BATCH)))
    return batches


def iterate_all_ids() -> Iterator[Batch]:
    """Batches that contain every id, so that every row is created."""
    items = -(-ITEMS // (_BATCH * (1 + _HISTORY)))
    for index in range(max(items, -(-USERS // _BATCH))):
        user = np.arange(index * _BATCH, (index + 1) * _BATCH) % USERS
        start = index * _BATCH * (1 + _HISTORY)
        item = np.arange(start, start + _BATCH * (1 + _HISTORY)) % ITEMS
        yield _make_batch(user, item[:_BATCH], item[_BATCH:], np.zeros(_BATCH))


def _cumulative_zipf(rows: int) -> np.ndarray[Any, Any]:
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -_ZIPF
    return np.cumsum(weights / weights.sum())


def _make_batch(user: Any, item: Any, history: Any, clicked: Any) -> Batch:
    lengths = torch.tensor([1] * (2 * _BATCH) + [_HISTORY] * _BATCH)
    values = torch.from_numpy(np.concatenate([user, item, history]).astype(np.int64))
    ids = KeyedJaggedTensor(["user", "item", "history"], values, lengths=lengths)
    return {"ids": ids, "clicked": torch.from_numpy(clicked).float()}
