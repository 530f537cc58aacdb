"""Ranks that hold no shard of a table, and so none of the kernels that the others train it with."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from lightning_pipe.engine import InputError, PlanError, SetupError
from lightning_pipe.recsys.kernels.fused_kernels import find_fused_kernels
from tests.distributed import run_ranks
from tests.recsys.pipeline_cases import DEPTHS, Case, difference, outcome, sharded
from tests.recsys.rewrite_cases import ROWS, Batch, batches
from tests.recsys.sharding_cases import ADAGRAD
from tests.recsys.train_pipeline_cases import pipeline_of

# At eps 0 a gradient of zero makes NaN of a row.
NO_EPS = {**ADAGRAD, "init_args": {"lr": 0.1, "eps": 0.0}}


class OneTable(nn.Module):
    """One table, which one rank holds, and whose output is used in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        table = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=ROWS, feature_names=["f0"])
        self.bags = EmbeddingBagCollection(tables=[table])
        self.over = nn.Linear(3, 1)
        self.calls = 0

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.over(batch.dense)[:, 0]
        bags = self.bags(batch.sparse)["f0"].sum(1)
        self.calls += 1
        if self.calls % 2:
            scores = scores + bags
        return nn.functional.binary_cross_entropy_with_logits(scores, batch.label), scores.detach()


CASE = Case(OneTable, batches, "table_wise", NO_EPS)


def plans(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"kernels": len(find_fused_kernels(sharded(CASE).module))}
    expected = outcome(CASE, "serial")
    for plan in DEPTHS:
        values = outcome(CASE, plan).values
        found[plan] = difference(values, expected.values)
        found[f"{plan} finite"] = all(bool(value.isfinite().all()) for value in values.values())
    return found


@pytest.mark.parametrize("world_size", [3])
def test_all_agree_on_unused_outputs_where_one_rank_s_optimizer_minds_them(world_size: int) -> None:
    results = run_ranks(plans, world_size)
    assert sorted(found.pop("kernels") for found in results) == [0] * (world_size - 1) + [1]
    for found in results:
        assert {plan: found[plan] for plan in DEPTHS} == {plan: [] for plan in DEPTHS}
        assert all(found[f"{plan} finite"] for plan in DEPTHS)


def refused(rank: int, world_size: int) -> dict[str, str]:
    """What each rank raises where the kernels of rank 1 alone are of another kind."""
    found = {}

    def not_capturable(modules: Any) -> None:
        if rank == 1:
            raise SetupError("a kernel of another kind")

    with mock.patch("lightning_pipe.recsys.rewrite.model_rewrite.supports_late_rates", return_value=rank != 1):
        try:
            with pipeline_of(sharded(CASE), "fused_sparse_dist"):
                found["ahead"] = "no error"
        except PlanError as error:
            found["ahead"] = str(error)
    with mock.patch("lightning_pipe.recsys.rewrite.model_rewrite.check_calls_can_be_captured", not_capturable):
        try:
            with pipeline_of(sharded(CASE), "base", max_norm=1.0):
                found["clipped"] = "no error"
        except (SetupError, InputError) as error:
            found["clipped"] = str(error)
    return found


def test_kernels_that_one_rank_alone_has_are_refused_on_all() -> None:
    for found in run_ranks(refused, 2):
        assert "plan 'fused_sparse_dist' looks up batches ahead" in found["ahead"]
        assert "a kernel of another kind" in found["clipped"]
