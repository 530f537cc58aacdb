"""Replicated tables: no wrapper that reduces inside backward, no gradient left over."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.recsys.sharding_cases import (
    ADAGRAD,
    HISTORY,
    MOVIES,
    ROW_WISE_ADAGRAD,
    SGD,
    USERS,
    constraints_for,
    make_batch,
    make_model,
    shard,
    tables_of,
)
from tests.rounding import Reference

pytestmark = pytest.mark.usefixtures("one_rank")
REPLICATED = constraints_for("data_parallel")


def wrappers(objects: Iterable[object]) -> list[object]:
    return [found for found in objects if type(found) is DistributedDataParallel]


def test_no_distributed_data_parallel_is_left_anywhere() -> None:
    sharded = shard(make_model(), constraints=REPLICATED)
    gc.collect()
    assert not wrappers(gc.get_objects())
    assert sharded.sharded_modules["pooled"]._lookups


def test_a_step_clears_the_gradients_it_used() -> None:
    model = make_model()
    sharded = shard(model, constraints=REPLICATED)
    model(*make_batch(0, 0)).backward()
    assert tables_of(model)[USERS].grad is not None
    sharded.step_data_parallel_tables()
    assert tables_of(model)[USERS].grad is None
    after = sharded.full_table("users")
    sharded.step_data_parallel_tables()  # without a gradient since
    assert torch.equal(sharded.full_table("users"), after)


def test_tables_of_one_kernel_are_stepped_by_their_own_optimizers() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    def build() -> nn.Module:
        model = make_model()
        tables = tables_of(model)
        _apply_optimizer_in_backward(torch.optim.Adagrad, [tables[USERS]], {"lr": 0.1, "eps": 1e-10})
        _apply_optimizer_in_backward(torch.optim.SGD, [tables[MOVIES], tables[HISTORY]], {"lr": 0.2})
        return model

    def unsharded() -> dict[str, Any]:
        model = build()
        for step in range(3):
            model(*make_batch(step, 0)).backward()
        return {**tables_of(model)}

    model = build()
    sharded = shard(model, sparse_optimizer=None, constraints=REPLICATED)
    for step in range(3):
        model(*make_batch(step, 0)).backward()
        sharded.step_data_parallel_tables()
    assert Reference.of(unsharded).differences({name: sharded.full_table(name) for name in tables_of(model)}) == []


@pytest.mark.parametrize(
    ("optimizer", "shapes"), [(SGD, []), (ADAGRAD, [(24, 8)]), (ROW_WISE_ADAGRAD, [(24,)])], ids=["sgd", "ada", "row"]
)
def test_their_state_looks_like_a_sharded_table_s(optimizer: dict[str, object], shapes: list[tuple[int, ...]]) -> None:
    for pooled in ("data_parallel", "table_wise"):
        model: nn.Module = make_model()
        sharded = shard(model, sparse_optimizer=optimizer, constraints=constraints_for(pooled))
        state = sharded.fused_optimizer.state_dict()["state"][USERS]
        assert list(state) == ["users.momentum1"][: len(shapes)]
        assert [tuple(value.shape) for value in sharded.full_table_optimizer_state("users").values()] == shapes
