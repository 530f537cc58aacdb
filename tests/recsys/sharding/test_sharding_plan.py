"""The planner: one plan in every run, and plans of the user's own."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
)

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.sharding.sharders import default_sharders
from lightning_pipe.recsys.sharding.sharding_plan import OrderedEnumerator
from tests.recsys.sharding_cases import ROW_WISE_ADAGRAD, constraints_for, make_model, shard


def test_options_are_listed_in_one_order_whatever_python_s_hash_seed() -> None:
    """TorchRec's come out of sets of strings, and the planner takes the first of equally good plans."""
    wanted = [kind.value for kind in reversed(ShardingType)]
    constraints = {"users": ParameterConstraints(sharding_types=wanted), "movies": ParameterConstraints()}
    enumerator = OrderedEnumerator(Topology(world_size=2, compute_device="cpu"), 8, constraints)
    listed: dict[str, list[str]] = {}
    for option in enumerator.enumerate(make_model(), default_sharders()):
        listed.setdefault(option.name, []).append(option.sharding_type)
    assert set(listed) == {"users", "movies", "history"}
    assert listed["users"] == [kind.value for kind in ShardingType]
    assert listed["history"] == ["table_wise", "column_wise", "row_wise"]


def one_shard(rows: int, columns: int) -> EnumerableShardingSpec:
    return EnumerableShardingSpec(
        [ShardMetadata(shard_offsets=[0, 0], shard_sizes=[rows, columns], placement="rank:0/cpu")]
    )


def plan(**changed: ParameterSharding) -> ShardingPlan:
    def sharding() -> ParameterSharding:
        return ParameterSharding("table_wise", "fused", [0], one_shard(24, 8))

    pooled = {"users": sharding(), "movies": sharding(), **changed}
    return ShardingPlan(
        {
            "pooled": EmbeddingModuleShardingPlan(pooled),
            "sequence": EmbeddingModuleShardingPlan({"history": pooled.pop("history", sharding())}),
        }
    )


@pytest.mark.usefixtures("one_rank")
def test_a_plan_of_the_user_s_own_is_used() -> None:
    sharded = shard(make_model(), sharding_plan=plan(users=ParameterSharding("data_parallel", "dense", [0], None)))
    assert [table.sharding_type for table in sharded.tables.values()] == ["data_parallel", "table_wise", "table_wise"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"history": ParameterSharding("data_parallel", "dense", [0], None)}, "pools sequences"),
        ({"users": ParameterSharding("table_wise", "dense", [0], one_shard(24, 8))}, "compute kernel dense"),
        ({"users": ParameterSharding("by_hand", "fused", [0], one_shard(24, 8))}, "names by_hand. Use some of"),
    ],
)
def test_a_plan_that_leaves_a_table_untrained_is_refused(changed: dict[str, ParameterSharding], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        shard(make_model(), sharding_plan=plan(**changed))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("module", [EmbeddingBagCollection, EmbeddingCollection])
def test_a_width_that_no_kernel_has_is_refused_by_the_table_s_name(module: Any) -> None:
    config = EmbeddingBagConfig if module is EmbeddingBagCollection else EmbeddingConfig
    tables = module([config(name="narrow", embedding_dim=6, num_embeddings=24, feature_names=["user"])])
    with pytest.raises(SetupError, match=r"table tables\..*narrow.* has embedding_dim 6, .* gets 6 columns"):
        shard(nn.ModuleDict({"tables": tables}))


@pytest.mark.usefixtures("one_rank")
def test_a_replicated_table_may_have_any_width() -> None:
    size: Any = {"name": "narrow", "embedding_dim": 3, "num_embeddings": 24, "feature_names": ["user"]}
    module = nn.ModuleDict({"tables": EmbeddingBagCollection([EmbeddingBagConfig(**size)])})
    sharded = shard(module, constraints={"narrow": {"sharding_types": ["data_parallel"]}})
    assert sharded.full_table("narrow").shape == (24, 3)


@pytest.mark.usefixtures("one_rank")
def test_constraints_that_leave_nothing_are_an_error_that_says_why() -> None:
    constraints = {"users": {"sharding_types": ["table_wise"], "compute_kernels": ["dense"]}}
    with pytest.raises(SetupError, match=r"planner found no plan .*Relax the constraints.*users"):
        shard(make_model(), constraints=constraints)


@pytest.mark.usefixtures("one_rank")
def test_rows_split_under_an_optimizer_with_one_state_a_row_are_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "lightning_pipe.recsys.sharding.sharding_plan"):
        sharded = shard(
            make_model(), sparse_optimizer=ROW_WISE_ADAGRAD, constraints=constraints_for("column_wise", "row_wise")
        )
    warned = [
        record.getMessage()
        for record in caplog.records
        if record.name == "lightning_pipe.recsys.sharding.sharding_plan"
    ]
    assert len(warned) == 2
    assert "users.weight is split by columns (column_wise)" in warned[0]
    assert sharded.full_table_optimizer_state("users")["momentum1"].shape == (48,)  # a row of each shard
