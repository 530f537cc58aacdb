"""Reading and steering the tables of a sharded module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from tests.recsys.sharding_cases import (
    ADAGRAD,
    HISTORY,
    MOVIES,
    ROW_WISE_ADAGRAD,
    SGD,
    USERS,
    Model,
    constraints_for,
    make_batch,
    make_model,
    shard,
)

pytestmark = pytest.mark.usefixtures("one_rank")


def moved(sharded: ShardedModel, table: str, step: Any) -> float:
    before = sharded.full_table(table)
    step()
    return float((sharded.full_table(table) - before).abs().max())


def look_up(model: nn.Module) -> torch.Tensor:
    """A loss that moves every row it looks up by one learning rate under SGD."""
    ids = KeyedJaggedTensor(["user", "item"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    result: torch.Tensor = model.get_submodule("pooled")(ids)["user"].sum()
    return result


def test_a_learning_rate_reaches_the_lookups_that_come_after_it() -> None:
    model = make_model()
    sharded = shard(model)  # SGD at 0.5
    assert moved(sharded, USERS, lambda: look_up(model).backward()) == pytest.approx(0.5)
    loss = look_up(model)
    sharded.set_learning_rate_factor(0.1)
    assert moved(sharded, USERS, loss.backward) == pytest.approx(0.5)  # looked up before the change
    assert moved(sharded, USERS, lambda: look_up(model).backward()) == pytest.approx(0.05)
    sharded.set_learning_rate_factor(2.0)  # of the base rate, not of the last one
    assert moved(sharded, USERS, lambda: look_up(model).backward()) == pytest.approx(1.0)


def test_a_learning_rate_reaches_replicated_tables() -> None:
    model = make_model()
    sharded = shard(model, constraints=constraints_for("data_parallel"))

    def step() -> None:
        look_up(model).backward()
        sharded.step_data_parallel_tables()

    assert moved(sharded, USERS, step) == pytest.approx(0.5)
    sharded.set_learning_rates({"users": 0.25})
    assert moved(sharded, USERS, step) == pytest.approx(0.25)
    assert sharded.learning_rates() == {USERS: 0.25, MOVIES: 0.5, HISTORY: 0.5}


class Twins(nn.Module):
    """Two tables that a kernel can hold both of."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=8, feature_names=[name]) for name in "ab"
        ]
        self.pooled = EmbeddingBagCollection(tables=tables)


A, B = "pooled.embedding_bags.a.weight", "pooled.embedding_bags.b.weight"
TWINS = {name: {"sharding_types": ["table_wise"]} for name in "ab"}


def test_tables_in_one_kernel_cannot_have_two_rates() -> None:
    sharded = shard(Twins(), constraints=TWINS)
    with pytest.raises(SetupError, match=rf"share one kernel .*{A}: 0\.5, {B}: 0\.25.*base rates that differ"):
        sharded.set_learning_rates({"b": 0.25})
    assert sharded.learning_rates() == {A: 0.5, B: 0.5}
    sharded.set_learning_rates({"a": 0.25, "b": 0.25})
    assert sharded.learning_rates() == {A: 0.25, B: 0.25}


def test_an_unknown_or_ambiguous_table_is_an_error_that_lists_the_tables() -> None:
    sharded = shard(nn.ModuleDict({"one": make_model(), "two": make_model()}))
    with pytest.raises(SetupError, match=r"one\.pooled.* got 'users', which names 2 tables"):
        sharded.full_table("users")
    with pytest.raises(SetupError, match="got 'genres', which names 0 tables"):
        sharded.set_learning_rates({"genres": 0.1})
    assert sharded.full_table(f"two.{USERS}").shape == (24, 8)


@pytest.mark.parametrize("pooled", ["table_wise", "data_parallel"])
@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ROW_WISE_ADAGRAD], ids=lambda o: str(o["class_path"]))
def test_a_checkpoint_of_tables_and_their_optimizers_continues_as_if_never_interrupted(
    pooled: str, optimizer: dict[str, Any]
) -> None:
    def sharded(seed: int) -> ShardedModel:
        return shard(make_model(Model, seed), sparse_optimizer=optimizer, constraints=constraints_for(pooled))

    def train(trained: ShardedModel, steps: range) -> None:
        for step in steps:
            trained.module(*make_batch(step, 0)).backward()
            trained.step_data_parallel_tables()

    whole, first, second = sharded(1), sharded(1), sharded(2)
    train(whole, range(4))
    train(first, range(2))
    second.dmp.load_state_dict(first.dmp.state_dict())
    second.fused_optimizer.load_state_dict(first.fused_optimizer.state_dict())
    assert set(second.fused_optimizer.state_dict()["state"]) == set(whole.tables)
    train(second, range(2, 4))
    for name in whole.tables:
        assert torch.equal(second.full_table(name), whole.full_table(name)), name
        states = whole.full_table_optimizer_state(name)
        assert list(states) == ([] if optimizer is SGD else ["momentum1"])
        for key, state in second.full_table_optimizer_state(name).items():
            assert torch.equal(state, states[key])
