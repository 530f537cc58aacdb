"""Batches, and tables, that cannot be trained: each says what to do, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys.modules.dynamic_modules import DynamicEmbeddingBagCollection
from tests.distributed import run_ranks
from tests.recsys.dynamic.dynamic_cases import KEYS, SGD, WIDTH, Batch, Model, batch, same, shard, tables, train

PLANS = ("serial", "threaded_input", "prefetch", "fused_sparse_dist")


class Bags(nn.Module):
    """Bags alone."""

    def __init__(self, store: Path, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        chosen = tables() if "is_weighted" not in options else tables()[:1]
        self.bags = DynamicEmbeddingBagCollection(chosen, store, seed=1, **options)
        self.over = nn.Linear(2 + sum(len(table.feature_names) for table in chosen) * WIDTH, 1)

    def forward(self, batch: Batch) -> Any:
        scores = self.over(torch.cat([batch.dense, self.bags(batch.sparse).values()], dim=1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(scores, batch.label, reduction="sum"), scores.detach()


def without_samples(step: int, rank: int) -> Batch:
    """The third has none, on the last rank."""
    if step != 2 or rank != torch.distributed.get_world_size() - 1:
        return batch(step, rank)
    nothing = torch.empty(0, dtype=torch.int64)
    return Batch(torch.empty(0, 2), KeyedJaggedTensor(KEYS, nothing, lengths=nothing), torch.empty(0))


def weighted(step: int, rank: int) -> Batch:
    plain = batch(step, rank)
    values = plain.sparse.values()
    weights = torch.rand(len(values), generator=torch.Generator().manual_seed(step))
    plain.sparse = KeyedJaggedTensor(KEYS, values, lengths=plain.sparse.lengths(), weights=weights)
    return plain


def raised(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def bags(rank: int, world_size: int, path: Path) -> list[list[torch.Tensor]]:
    return [train(shard(Bags(path / plan), SGD), range(4), plan, make=without_samples) for plan in PLANS]


def test_bags_of_a_batch_without_samples_have_no_rows(tmp_path: Path) -> None:
    (found,) = run_ranks(bags, 1, tmp_path)
    for scores in found:
        assert [len(one) for one in scores] == [4, 4, 0, 4]
        assert same(scores, found[0])


def weights(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    def scores(name: str, make: Any, **options: Any) -> list[torch.Tensor]:
        return train(shard(Bags(path / name, **options), SGD), range(4), make=make)

    return {
        "none": scores("none", batch, is_weighted=False),
        "unasked": scores("unasked", weighted, is_weighted=False),
        "asked": scores("asked", weighted, is_weighted=True),
        "missing": raised(lambda: scores("missing", batch, is_weighted=True)),
    }


def test_weights_count_where_they_are_asked_for_and_nowhere_else(tmp_path: Path) -> None:
    """As unsharded modules have it."""
    for found in run_ranks(weights, 2, tmp_path):
        assert same(found["unasked"], found["none"])
        assert not same(found["asked"], found["none"])
        assert "has is_weighted=True" in found["missing"]
        assert "expected a weight for each id" in found["missing"]


def test_a_state_dict_without_rows_is_loaded_into_a_module_that_is_not_sharded(tmp_path: Path) -> None:
    class Other(nn.Module):
        def __init__(self, store: Path) -> None:
            super().__init__()
            self.inner = Model(store)

    written = Other(tmp_path).inner.over.state_dict()
    read = Other(tmp_path)
    state = {f"inner.over.{name}": value + 1 for name, value in written.items()}
    read.load_state_dict(state)
    assert same(dict(read.inner.over.state_dict()), {name: value + 1 for name, value in written.items()})
    with pytest.raises(RuntimeError, match=r"inner\.over\.bias"):
        read.load_state_dict({"inner.over.weight": state["inner.over.weight"]})
