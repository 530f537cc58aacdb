"""Freezing tables after sharding."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch import nn

from lightning_pipe.engine.common.errors import SetupError
from tests.distributed import run_ranks
from tests.recsys.sharding_cases import HISTORY, USERS, constraints_for, make_model, shard, tables_of


def _by_attribute(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad = False


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("pooled", ["table_wise", "data_parallel"])
@pytest.mark.parametrize("freeze", [lambda model: model.requires_grad_(False), _by_attribute])
def test_freezing_after_sharding_is_refused_with_the_table_and_the_way_out(
    freeze: Callable[[nn.Module], None], pooled: str
) -> None:
    model = make_model()
    shard(model, constraints=constraints_for(pooled))
    with pytest.raises(SetupError, match=rf"table {USERS} cannot be frozen after sharding.*\.detach\(\)"):
        freeze(model.get_submodule("pooled"))
    with pytest.raises(SetupError, match=f"table {HISTORY} cannot be frozen"):
        freeze(model.get_submodule("sequence"))


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_table_says_that_it_is_trained_and_may_be_told_so() -> None:
    model = make_model()
    shard(model)
    model.requires_grad_(True)
    assert all(parameter.requires_grad for parameter in tables_of(model).values())
    model.dense.requires_grad_(False)


def copied(rank: int, world_size: int) -> list[bool]:
    group = dist.group.WORLD
    assert group is not None
    model = make_model()
    shard(model, group=group)
    return [copy.deepcopy(parameter).requires_grad for parameter in tables_of(model).values()]


def test_a_table_that_this_or_another_rank_holds_can_be_copied() -> None:
    for trained in run_ranks(copied, 2):
        assert trained
        assert all(trained)
