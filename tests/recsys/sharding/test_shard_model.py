"""Sharding a whole module: values, training, every sharding type, and the errors that every rank raises."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from torchrec.distributed.types import ShardingType

from lightning_pipe.engine.common.errors import SetupError
from tests.distributed import run_ranks
from tests.recsys.sharding_cases import (
    ADAGRAD,
    HISTORY,
    MOVIES,
    ROW_WISE_ADAGRAD,
    SGD,
    USERS,
    Model,
    Processed,
    SumPooled,
    apply_in_backward,
    constraints_for,
    differences_from_unsharded,
    make_batch,
    make_model,
    shard,
    tables_of,
)
from tests.rounding import Reference

OPTIMIZERS = {"sgd": SGD, "adagrad": ADAGRAD, "row_wise_adagrad": ROW_WISE_ADAGRAD}
POOLED = [kind.value for kind in ShardingType]
ON_ONE_NODE = [
    *(("sgd" if place % 2 == 0 else "adagrad", pooled, "table_wise") for place, pooled in enumerate(POOLED)),
    ("row_wise_adagrad", "table_wise", "row_wise"),
    ("row_wise_adagrad", "row_wise", "row_wise"),
    ("adagrad", "data_parallel", "column_wise"),
]
ON_TWO_NODES = [("adagrad", pooled, "row_wise") for pooled in ("table_row_wise", "table_column_wise", "grid_shard")]
PROCESSED = ["table_wise", "row_wise", "data_parallel", "column_wise"]


# Training: the same as the unsharded module under torch's in-backward optimizer.


def train_all(rank: int, world_size: int, cases: list[tuple[str, str, str]]) -> dict[Any, Any]:
    return {
        case: differences_from_unsharded(
            rank,
            world_size,
            OPTIMIZERS[case[0]],
            constraints_for(*case[1:]),
            SumPooled if case[1] == "grid_shard" else Model,
        )
        for case in cases
    }


def train_on_two_nodes(rank: int, world_size: int) -> dict[Any, Any]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return train_all(rank, world_size, ON_TWO_NODES)


def train_processed(rank: int, world_size: int) -> dict[str, list[str]]:
    return {
        pooled: differences_from_unsharded(
            rank, world_size, ADAGRAD, {"users": {"sharding_types": [pooled], "min_partition": 4}}, Processed
        )
        for pooled in PROCESSED
    }


def everything_on_two_ranks(rank: int, world_size: int) -> dict[str, Any]:
    """In one go: it takes ten times as long to start two processes as to try one case in them."""
    return {
        "trained": train_all(rank, world_size, ON_ONE_NODE),
        "processed": train_processed(rank, world_size),
        "initial": initial_values(rank, world_size),
        "errors": errors_on_ranks(rank, world_size),
        "unused": differences_where_one_rank_has_no_gradient(rank, world_size),
    }


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    return run_ranks(everything_on_two_ranks, 2)


@pytest.fixture(scope="module")
def initial(two_ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [found["initial"] for found in two_ranks]


@pytest.fixture(scope="module")
def errors(two_ranks: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [found["errors"] for found in two_ranks]


@pytest.fixture(scope="module")
def trained_on_two_nodes() -> dict[Any, Any]:
    return run_ranks(train_on_two_nodes, 4)[0]


@pytest.mark.parametrize("case", ON_ONE_NODE, ids="-".join)
def test_tables_are_trained_as_unsharded_ones_on_two_ranks(
    two_ranks: list[dict[str, Any]], case: tuple[str, str, str]
) -> None:
    assert two_ranks[0]["trained"][case] == []


@pytest.mark.parametrize("case", ON_TWO_NODES, ids="-".join)
def test_tables_are_trained_as_unsharded_ones_on_two_nodes_of_two_ranks(
    trained_on_two_nodes: dict[Any, Any], case: tuple[str, str, str]
) -> None:
    assert trained_on_two_nodes[case] == []


@pytest.mark.parametrize("pooled", PROCESSED)
def test_feature_processed_tables_are_trained_as_unsharded_ones(two_ranks: list[dict[str, Any]], pooled: str) -> None:
    assert two_ranks[0]["processed"][pooled] == []


def differences_where_one_rank_has_no_gradient(rank: int, world_size: int) -> list[str]:
    def unsharded() -> dict[str, Any]:
        model = make_model()
        apply_in_backward(model, SGD)
        (model.get_submodule("pooled")(make_batch(0, 0)[0]).values().sum() / world_size).backward()
        return {USERS: tables_of(model)[USERS]}

    model = make_model()
    sharded = shard(model, constraints=constraints_for("data_parallel"))
    if rank == 0:
        model.get_submodule("pooled")(make_batch(0, 0)[0]).values().sum().backward()
    sharded.step_data_parallel_tables()
    return Reference.of(unsharded).differences({USERS: sharded.full_table("users")})


def test_a_rank_without_a_gradient_for_replicated_tables_counts_as_zero_and_keeps_nobody_waiting(
    two_ranks: list[dict[str, Any]],
) -> None:
    assert [found["unused"] for found in two_ranks] == [[], []]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tables_are_trained_as_unsharded_ones_on_one_rank(name: str) -> None:
    assert differences_from_unsharded(0, 1, OPTIMIZERS[name], {}) == []


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("pooled", ["table_wise", "data_parallel"])
def test_an_optimizer_said_torchrecs_way_steps_a_table_once_and_is_kept_beside_a_default(pooled: str) -> None:
    def unsharded() -> dict[str, Any]:
        model = make_model()
        apply_in_backward(model, ADAGRAD, [USERS])
        apply_in_backward(model, SGD, [MOVIES, HISTORY])
        for step in range(3):
            model(*make_batch(step, 0)).backward()
        return {**tables_of(model)}

    model = make_model()
    apply_in_backward(model, ADAGRAD, [USERS])
    sharded = shard(model, sparse_optimizer=SGD, constraints=constraints_for(pooled))
    for step in range(3):
        model(*make_batch(step, 0)).backward()
        sharded.step_data_parallel_tables()
    assert Reference.of(unsharded).differences({name: sharded.full_table(name) for name in tables_of(model)}) == []


# Values before training.


def initial_values(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    random_before = torch.get_rng_state()
    model = make_model(seed=7 + rank)  # ranks differ: rank 0's values count
    expected = tables_of(make_model(seed=7))
    sharded = shard(model, constraints=constraints_for("row_wise", "column_wise"))
    found["held"] = all(torch.equal(sharded.full_table(name), values) for name, values in expected.items())
    found["dense"] = torch.equal(model.get_parameter("dense.weight"), make_model(seed=7).get_parameter("dense.weight"))
    for pooled, sequence in (("table_wise", "column_wise"), ("column_wise", "row_wise"), ("data_parallel", "row_wise")):
        meta = shard(Model("meta"), constraints=constraints_for(pooled, sequence), seed=11 + rank)
        found[pooled] = {name: meta.full_table(name) for name in meta.tables}
        found[f"{pooled} dense"] = dict(meta.dense_parameters())["dense.weight"].detach()
    found["random state kept"] = torch.equal(random_before, torch.get_rng_state())
    for pooled in PRETRAINED_TYPES:
        model = pretrained()
        sharded = shard(model, constraints={"t": {"sharding_types": [pooled], "min_partition": 4}})
        found[f"pretrained {pooled}"] = torch.equal(sharded.full_table("t"), MATRIX)
    return found


def test_tables_and_dense_parameters_start_with_the_values_that_the_first_rank_held(
    initial: list[dict[str, Any]],
) -> None:
    assert [(found["held"], found["dense"]) for found in initial] == [(True, True)] * 2


PRETRAINED_TYPES = ["row_wise", "table_wise", "column_wise", "data_parallel"]
MATRIX = torch.arange(21.0 * 8).view(21, 8)


def pretrained(device: str = "cpu", matrix: torch.Tensor = MATRIX) -> nn.Module:
    """A table whose ``init_fn`` only accepts the whole table."""
    config = EmbeddingBagConfig(
        name="t",
        num_embeddings=21,
        embedding_dim=8,
        feature_names=["f"],
        init_fn=lambda weight: weight.data.copy_(matrix),
    )
    return nn.Sequential(EmbeddingBagCollection([config], device=torch.device(device)))


@pytest.mark.parametrize("pooled", PRETRAINED_TYPES)
def test_an_init_fn_is_not_called_again_for_values_that_are_kept(initial: list[dict[str, Any]], pooled: str) -> None:
    assert [found[f"pretrained {pooled}"] for found in initial] == [True, True]


def test_sharding_leaves_the_global_random_state_alone(initial: list[dict[str, Any]]) -> None:
    assert all(found["random state kept"] for found in initial)


@pytest.mark.usefixtures("one_rank")
def test_tables_on_the_meta_device_get_the_same_values_however_they_are_sharded(initial: list[dict[str, Any]]) -> None:
    alone = shard(Model("meta"), seed=11)
    for name in alone.tables:
        values = alone.full_table(name)
        bound = ROWS_BOUND
        assert values.abs().max() <= bound
        assert values.std() > bound / 3  # neither zeros nor one value
        for found in initial:
            for pooled in ("table_wise", "column_wise", "data_parallel"):
                assert torch.equal(found[pooled][name], values), (name, pooled)
    for found in initial:
        assert torch.equal(found["table_wise dense"], dict(alone.dense_parameters())["dense.weight"])


ROWS_BOUND = 24**-0.5  # TorchRec's default: uniform within one over the root of the rows


@pytest.mark.usefixtures("one_rank")
def test_unsharded_tables_are_freed_with_the_state_of_their_optimizers() -> None:
    model = make_model()
    apply_in_backward(model, ADAGRAD)
    held = tables_of(model)
    assert held
    shard(model, sparse_optimizer=None)
    for parameter in held.values():
        assert parameter.numel() == 0
        assert parameter._in_backward_optimizers == []  # type: ignore[attr-defined]


# Errors: the same on every rank, and no hang.


def error_of(**arguments: Any) -> str:
    model = arguments.pop("model", None)
    with pytest.raises(SetupError) as caught:
        shard(make_model() if model is None else model, **arguments)
    return str(caught.value)


OTHER_TABLES: dict[str, dict[str, Any]] = {
    "4 rows": {"num_embeddings": 5},
    "pooled by sum": {"pooling": PoolingType.MEAN},
}


def _one_table(**given: Any) -> nn.Module:
    known = {"name": "t", "num_embeddings": 4, "embedding_dim": 8, "feature_names": ["a", "b"]}
    return nn.Sequential(EmbeddingBagCollection([EmbeddingBagConfig(**{**known, **given})]))


def errors_on_ranks(rank: int, world_size: int) -> dict[str, str]:
    found = {
        "one rank alone": error_of(model=nn.Linear(2, 2) if rank == 1 else None),
        "no plan": error_of(topology={"ddr_cap": 1000}),
        "another model": error_of(model=nn.Sequential(make_model()) if rank == 1 else None),
        "another rate": error_of(sparse_optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1 + rank}}),
        "init_fn": error_of(
            model=pretrained("meta", MATRIX[:5]), constraints={"t": {"sharding_types": ["table_wise"]}}
        ),
        "a plan without tables": error_of(sharding_plan=_empty_plan() if rank == 0 else None),
        **{name: error_of(model=_one_table(**(given if rank == 1 else {}))) for name, given in OTHER_TABLES.items()},
    }
    shard(make_model())  # and the ranks still understand each other
    return found


def _empty_plan() -> Any:
    from torchrec.distributed.types import ShardingPlan

    return ShardingPlan({})


def test_an_error_of_one_rank_is_raised_on_every_rank(errors: list[dict[str, str]]) -> None:
    assert "holds no TorchRec embedding module" in errors[1]["one rank alone"]
    assert "rank 1: " in errors[0]["one rank alone"]
    assert "strategy='pipeline'" in errors[0]["one rank alone"]


def test_an_init_fn_that_fails_on_the_rank_of_the_table_is_an_error_on_every_rank(
    errors: list[dict[str, str]],
) -> None:
    for found in errors:
        assert "the init_fn of table 0.embedding_bags.t.weight" in found["init_fn"]


def test_a_planner_without_a_plan_is_an_error_on_every_rank(errors: list[dict[str, str]]) -> None:
    for found in errors:
        assert "planner found no plan" in found["no plan"]
        assert "ddr_cap" in found["no plan"]


def test_different_modules_or_optimizers_on_two_ranks_are_an_error_on_every_rank(errors: list[dict[str, str]]) -> None:
    for found in errors:
        assert USERS in found["another model"]
        assert f"0.{USERS}" in found["another model"]
        assert "lr=0.1)" in found["another rate"]
        assert "lr=1.1)" in found["another rate"]


ON_RANK_1 = ["5 rows", "pooled by mean"]


@pytest.mark.parametrize(("first", "second"), list(zip(OTHER_TABLES, ON_RANK_1, strict=True)))
def test_what_a_table_differs_in_is_named_on_every_rank(errors: list[dict[str, str]], first: str, second: str) -> None:
    table = "table 0.embedding_bags.t.weight"
    said = (
        f"the module differs between ranks: rank 0 has {f'{table} {first}'!r}, but rank 1 has {f'{table} {second}'!r}."
        " Give every rank the same module"
    )
    assert [found[first] for found in errors] == [said, said]


def test_the_first_rank_s_plan_counts_and_must_name_every_table(errors: list[dict[str, str]]) -> None:
    for found in errors:
        assert "has no entry for table users" in found["a plan without tables"]


@pytest.mark.usefixtures("one_rank")
def test_tables_without_an_optimizer_are_named() -> None:
    model = make_model()
    apply_in_backward(model, SGD, [MOVIES])
    message = error_of(model=model, sparse_optimizer=None)
    assert USERS in message
    assert HISTORY in message
    assert MOVIES not in message
    assert "sparse_optimizer" in message


@pytest.mark.usefixtures("one_rank")
def test_tables_that_are_only_evaluated_need_no_optimizer_and_cannot_be_trained_later() -> None:
    model = make_model()
    tables_of(model)[MOVIES].requires_grad_(False)
    values = {name: parameter.clone() for name, parameter in tables_of(model).items()}
    sharded = shard(model, sparse_optimizer=None, trains=False)
    assert all(torch.equal(sharded.full_table(name), value) for name, value in values.items())
    with pytest.raises(SetupError, match=rf"sharded for an evaluation.*{USERS}.*{MOVIES}.*cannot be trained"):
        sharded.refuse_untrainable_tables()
    shard(make_model(), trains=False).refuse_untrainable_tables()  # these have an optimizer


@pytest.mark.usefixtures("one_rank")
def test_a_module_sharded_already_is_refused() -> None:
    model = make_model()
    shard(model)
    assert "is sharded already" in error_of(model=model)


@pytest.mark.usefixtures("one_rank")
def test_a_compiled_embedding_module_is_refused_by_name() -> None:
    model: Any = make_model()
    model.pooled = torch.compile(model.pooled)
    assert "module pooled is the result of torch.compile" in error_of(model=model)


# What sharding leaves of the module.


@pytest.mark.usefixtures("one_rank")
def test_the_module_is_sharded_in_place_and_told_apart_into_tables_and_dense_parameters() -> None:
    model = make_model()
    sharded = shard(model, constraints=constraints_for("data_parallel"))
    assert sharded.module is model
    assert sharded.dmp.module is model
    assert list(sharded.sharded_modules) == ["pooled", "sequence"]
    assert sharded.sharded_modules["pooled"] is model.pooled
    assert {name: table.sharding_type for name, table in sharded.tables.items()} == {
        USERS: "data_parallel",
        MOVIES: "data_parallel",
        HISTORY: "table_wise",
    }
    assert [name for name, _ in sharded.dense_parameters()] == ["dense.weight", "dense.bias"]
    assert [name for name, _ in sharded.table_parameters()] == [USERS, MOVIES, HISTORY]


@pytest.mark.usefixtures("one_rank")
def test_a_torchrec_module_by_itself_becomes_a_new_module_with_its_values() -> None:
    bags = make_model().get_submodule("pooled")
    before = {name: parameter.detach().clone() for name, parameter in bags.named_parameters()}
    sharded = shard(bags)
    assert sharded.module is not bags
    assert list(sharded.sharded_modules) == [""]
    assert sharded.dense_parameters() == []
    for name, values in before.items():
        assert torch.equal(sharded.full_table(name), values)
