"""A table that two modules share is refused with both names; one module looks it up for both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from lightning_pipe.engine import SetupError
from tests.distributed import run_ranks
from tests.rounding import Reference
from tests.strategies.cases import (
    IDS,
    SGD,
    WIDTH,
    Batch,
    Clicks,
    difference,
    fit,
    loader,
    recsys,
    state_of,
)


class Shared(nn.Module):
    """The same table, pooled and as sequences, in one way or another."""

    def __init__(self, share: Callable[[Any], None]) -> None:
        super().__init__()
        options: dict[str, Any] = {"embedding_dim": WIDTH, "num_embeddings": IDS}
        self.bags = EmbeddingBagCollection(tables=[EmbeddingBagConfig(name="goods", feature_names=["item"], **options)])
        self.history = EmbeddingCollection(tables=[EmbeddingConfig(name="goods", feature_names=["past"], **options)])
        share(self)


def _parameter(model: Any) -> None:
    model.history.embeddings["goods"].weight = model.bags.embedding_bags["goods"].weight


def _memory(model: Any) -> None:
    model.history.embeddings["goods"].weight = nn.Parameter(model.bags.embedding_bags["goods"].weight.data)


def _module(model: Any) -> None:
    model.again = model.bags


SHARED: list[tuple[Any, str]] = [
    (_parameter, r"network\.bags\.\S+ and network\.history\.\S+ are one parameter"),
    (_memory, r"network\.bags\.\S+ and network\.history\.\S+ share memory"),
    (_module, r"network\.bags and network\.again are one EmbeddingBagCollection"),
]


def refused(rank: int, world_size: int) -> None:
    for share, message in SHARED:
        with pytest.raises(SetupError, match=message):
            fit(Clicks(lambda: Shared(share)), recsys(optimizer=SGD))  # noqa: B023


def test_a_shared_table_is_refused_with_both_names_on_every_rank() -> None:
    run_ranks(refused, 2)


class OneCollection(nn.Module):
    """Sequences of two features of a table; those of one are pooled here."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(name="goods", feature_names=["item", "past"], embedding_dim=WIDTH, num_embeddings=IDS)
        self.items = EmbeddingCollection(tables=[table])
        self.over = nn.Sequential(nn.Linear(3 + 2 * WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: Batch) -> Tensor:
        found = self.items(batch.sparse)
        pooled = torch.stack([row.sum(0) for row in found["item"].to_dense()])
        recent = torch.stack([row[-2:].sum(0) for row in found["past"].to_dense()])
        return self.over(torch.cat([batch.dense, pooled, recent], dim=1))[:, 0]


def in_one(rank: int, world_size: int) -> dict[str, Any]:
    module = Clicks(OneCollection)
    state = state_of(fit(module, recsys("prefetch", {"goods": "row_wise"}, SGD), loader(in_order=True), max_epochs=1))
    return {"losses": torch.tensor(module.losses), **state}


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_collection_looks_a_table_up_for_pooled_features_and_sequences(world_size: int) -> None:
    def unsharded() -> dict[str, Any]:
        module = Clicks(OneCollection, in_backward=SGD)
        state = state_of(fit(module, "auto", loader(batch_size=4 * world_size), max_epochs=1))
        return {"losses": torch.tensor(module.losses), **state}

    ranks = run_ranks(in_one, world_size)
    losses = sum(found.pop("losses") for found in ranks) / world_size
    assert all(difference(ranks[0], other) == [] for other in ranks)
    assert Reference.of(unsharded).differences({"losses": losses, **ranks[0]}) == []
