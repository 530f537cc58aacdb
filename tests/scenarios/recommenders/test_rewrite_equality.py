"""Training over the rewrite equals training the plainly sharded model, to the bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchrec
from torch import nn

from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
from tests.distributed import run_ranks
from tests.recsys.rewrite_cases import (
    Bags,
    Managed,
    Processed,
    Sequences,
    batches,
    groups,
    pipelined_losses,
    reference_losses,
    same_values,
    shard,
    trained_values,
    variable_batches,
)

MIXED = {"af0": "table_wise", "af1": "row_wise", "bf1": "data_parallel", "bf2": "column_wise"}

# name: model, batches, sharding, arguments of shard(), steps
EQUALITY: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Any]], Any, dict[str, Any]]] = {
    "pooled, table-wise": (Bags, lambda: batches(4), "table_wise", {}),
    "pooled, row-wise": (Bags, lambda: batches(4), "row_wise", {}),
    "pooled, column-wise": (Bags, lambda: batches(4), "column_wise", {}),
    "pooled, table-row-wise": (Bags, lambda: batches(4), "table_row_wise", {}),
    "pooled, data-parallel": (Bags, lambda: batches(4), "data_parallel", {}),
    "pooled, mixed sharding": (Bags, lambda: batches(4), MIXED, {}),
    "pooled, Adagrad": (Bags, lambda: batches(4), "table_wise", {"optimizer": torch.optim.Adagrad, "eps": 1e-8}),
    "pooled, row-wise Adagrad": (
        Bags,
        lambda: batches(4),
        "row_wise",
        {"optimizer": torchrec.optim.RowWiseAdagrad, "eps": 1e-8},
    ),
    "weighted": (lambda: Bags(weighted=True), lambda: batches(4, weighted=True), "row_wise", {}),
    "mean pooling over rows": (lambda: Bags(mean=True), lambda: batches(4), "row_wise", {}),
    "sequences, table-wise": (Sequences, lambda: batches(4), "table_wise", {}),
    "sequences, row-wise": (Sequences, lambda: batches(4), "row_wise", {}),
    "sequences, column-wise": (Sequences, lambda: batches(4), "column_wise", {}),
    "processed features, table-wise": (Processed, lambda: batches(4), "table_wise", {}),
    "processed features, row-wise": (Processed, lambda: batches(4), "row_wise", {}),
    "variable batch sizes, pooled": (Bags, lambda: variable_batches(4), "table_wise", {}),
    "variable batch sizes, sequences": (Sequences, lambda: variable_batches(4), "table_wise", {}),
    "managed collision, pooled": (lambda: Managed(pooled=True), lambda: batches(4), "row_wise", {}),
    "managed collision, sequences": (lambda: Managed(pooled=False), lambda: batches(4), "row_wise", {}),
}


def equality(rank: int, world: int) -> dict[str, tuple[bool, bool, list[str]]]:
    """For each case: are losses and values those of the plain model, and which modules were pipelined."""
    results = {}
    used = groups()
    for name, (build, data, kinds, options) in EQUALITY.items():
        plain = shard(build(), kinds, **options)
        expected = reference_losses(plain, data())
        model = shard(build(), kinds, **options)
        rewrite = ModelRewrite(model, **used)
        losses = pipelined_losses(rewrite, model, data())
        rewrite.restore()
        same = same_values(trained_values(model), trained_values(plain))
        results[name] = losses == expected, same, sorted(rewrite.pipelined)
    return results


@pytest.fixture(scope="module")
def equality_results() -> list[dict[str, tuple[bool, bool, list[str]]]]:
    return run_ranks(equality, 2)


@pytest.mark.parametrize("case", EQUALITY)
def test_training_is_bit_identical_to_the_plainly_sharded_model(
    equality_results: list[dict[str, tuple[bool, bool, list[str]]]], case: str
) -> None:
    pipelined = ["a"] if case.startswith("managed") else ["a", "b"]
    assert [results[case] for results in equality_results] == [(True, True, pipelined)] * 2


def two_hosts(rank: int, world: int) -> list[tuple[bool, bool]]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    used = groups()
    results = []
    for kinds in ("table_row_wise", "grid_shard"):
        plain = shard(Bags(width=256), kinds, local_size=2)
        expected = reference_losses(plain, batches(3))
        model = shard(Bags(width=256), kinds, local_size=2)
        rewrite = ModelRewrite(model, **used)
        losses = pipelined_losses(rewrite, model, batches(3))
        results.append((losses == expected, same_values(trained_values(model), trained_values(plain))))
    return results


def test_sharding_within_hosts_keeps_its_groups() -> None:
    assert run_ranks(two_hosts, 4) == [[(True, True)] * 2] * 4
