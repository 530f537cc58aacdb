"""The dense optimizer: tables are taken out of it, and its schedule is read."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dense.dense_optimizer import (
    TableParameterRegistry,
    learning_rate_factor,
    remove_table_parameters,
)
from tests.recsys.sharding_cases import MOVIES, USERS, make_batch, make_model, shard, tables_of


def parameter(size: int = 2) -> nn.Parameter:
    return nn.Parameter(torch.zeros(size))


def test_tables_are_taken_out_of_every_group_and_named_once() -> None:
    users, movies, weight, bias = parameter(), parameter(), parameter(), parameter()
    tables = TableParameterRegistry()
    tables.add_sharded("users", users)
    tables.add_sharded("movies", movies)
    groups: list[dict[str, Any]] = [{"params": [users, weight]}, {"params": [bias, movies], "lr": 0.5}]
    optimizer = torch.optim.Adam(groups)
    assert remove_table_parameters(optimizer, tables) == ["users", "movies"]
    assert [group["params"] for group in optimizer.param_groups] == [[weight], [bias]]
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert remove_table_parameters(optimizer, tables) == []


def test_a_table_as_it_was_before_sharding_is_taken_out_too_and_not_kept_alive() -> None:
    before, after, weight = parameter(), parameter(), parameter()
    tables = TableParameterRegistry()
    tables.add_sharded("users", after)
    tables.add_original("users", before)
    optimizer = torch.optim.SGD([before, after, weight], lr=0.1)
    assert remove_table_parameters(optimizer, tables) == ["users"]
    assert optimizer.param_groups[0]["params"] == [weight]
    gone = weakref.ref(before)
    del before, optimizer
    gc.collect()
    assert gone() is None


def test_a_group_of_nothing_but_tables_is_an_error_that_leaves_the_optimizer_as_it_was() -> None:
    users, weight = parameter(), parameter()
    tables = TableParameterRegistry()
    tables.add_sharded("users", users)
    optimizer = torch.optim.Adagrad([{"params": [weight]}, {"params": [users]}])
    with pytest.raises(SetupError, match=r"group 1 of the optimizer torch.optim.Adagrad holds .* \(users\)"):
        remove_table_parameters(optimizer, tables)
    assert [group["params"] for group in optimizer.param_groups] == [[weight], [users]]
    assert len(optimizer.state) == 2


@pytest.mark.usefixtures("one_rank")
def test_an_optimizer_over_all_parameters_of_a_sharded_module_trains_the_dense_ones_alone() -> None:
    model = make_model()
    originals = tables_of(model)
    sharded = shard(model)
    optimizer = torch.optim.SGD([*model.parameters(), *originals.values()], lr=0.1)
    assert set(remove_table_parameters(optimizer, sharded.table_parameters())) == set(sharded.tables)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for _, p in sharded.dense_parameters()]
    model(*make_batch(0, 0)).backward()
    before = sharded.full_table(USERS), sharded.full_table(MOVIES)
    optimizer.step()
    assert torch.equal(before[0], sharded.full_table(USERS))
    assert torch.equal(before[1], sharded.full_table(MOVIES))


def test_the_learning_rate_factor_is_how_far_a_scheduler_has_come() -> None:
    optimizer = torch.optim.SGD([parameter()], lr=0.4)
    assert learning_rate_factor(optimizer) == 1.0
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    assert learning_rate_factor(optimizer) == 1.0
    optimizer.step()
    scheduler.step()
    assert learning_rate_factor(optimizer) == pytest.approx(0.5)
