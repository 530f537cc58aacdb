"""Arguments with which FBGEMM's kernels are made for tables with a cache of rows; a CPU has none, but takes them."""

from __future__ import annotations

from typing import Any

import pytest
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import CacheParams, ParameterSharding, ShardingPlan

from lightning_pipe._compat.torchrec import iter_lookup_kernels_with_tables
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.modules.tables import find_tables
from lightning_pipe.recsys.sharding.cached_tables import add_cache_params_to_plan, read_cache_params
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from lightning_pipe.recsys.sharding.sharders import default_sharders
from lightning_pipe.recsys.sharding.sharding_plan import OrderedEnumerator
from tests.recsys.sharding.test_sharding_plan import one_shard, plan
from tests.recsys.sharding_cases import make_model, shard

pytestmark = pytest.mark.usefixtures("one_rank")


def cached(**params: Any) -> ParameterSharding:
    given = CacheParams(**params) if params else None
    return ParameterSharding("table_wise", "fused_uvm_caching", [0], one_shard(24, 8), cache_params=given)


def with_caches(**of_users: Any) -> ShardingPlan:
    """Users and history have a cache, movies have none."""
    return plan(users=cached(**of_users), history=cached())


def arguments(sharded: ShardedModel) -> dict[str, Any]:
    """Arguments of the kernel of each table."""
    return {
        config.name: config.fused_params
        for module in sharded.sharded_modules.values()
        for _, configs in iter_lookup_kernels_with_tables(module)
        for config in configs
    }


def prefetches(sharded: ShardedModel) -> dict[str, bool]:
    return {
        config.name: kernel.prefetch_pipeline
        for module in sharded.sharded_modules.values()
        for kernel, configs in iter_lookup_kernels_with_tables(module)
        for config in configs
    }


def test_tables_with_a_cache_are_made_for_prefetches_ahead_and_others_are_not() -> None:
    sharded = shard(make_model(), sharding_plan=with_caches())
    assert prefetches(sharded) == {"users": True, "history": True, "movies": False}


def test_a_plan_of_the_user_is_not_changed() -> None:
    given = with_caches()
    shard(make_model(), sharding_plan=given)
    assert given.plan["pooled"]["users"].cache_params is None


def test_arguments_by_fbgemm_s_names_reach_the_kernels_of_all_tables_or_of_one() -> None:
    fused_params = {
        "cache_load_factor": 0.5,
        "cache_precision": "fp16",
        "history": {"cache_load_factor": 0.25, "cache_reserved_memory": 1e6, "prefetch_pipeline": False},
    }
    sharded = shard(make_model(), sharding_plan=with_caches(), fused_params=fused_params)
    assert prefetches(sharded) == {"users": True, "history": False, "movies": False}
    found = arguments(sharded)
    assert found["users"]["cache_load_factor"] == 0.5
    assert found["users"]["cache_precision"] == SparseType.FP16
    assert (found["history"]["cache_load_factor"], found["history"]["cache_reserved_memory"]) == (0.25, 1e6)
    assert "cache_load_factor" not in found["movies"]


def test_the_least_frequently_used_rows_can_only_be_replaced_without_prefetches_ahead() -> None:
    sharded = shard(
        make_model(), sharding_plan=with_caches(load_factor=0.1), fused_params={"users": {"cache_algorithm": "LFU"}}
    )
    assert prefetches(sharded) == {"users": False, "history": True, "movies": False}
    assert arguments(sharded)["users"]["cache_algorithm"] is CacheAlgorithm.LFU
    assert arguments(sharded)["users"]["cache_load_factor"] == 0.1  # of the plan


def test_the_planner_of_a_gpu_plans_with_the_arguments_and_makes_tables_for_prefetches_ahead() -> None:
    model = make_model()
    tables = [table for table, _ in find_tables(model)]
    cache = read_cache_params({"cache_load_factor": 0.5}, tables)
    constraints = {
        name: ParameterConstraints(
            sharding_types=["table_wise"], compute_kernels=["fused_uvm_caching"], cache_params=params
        )
        for name, params in cache.items()
    }
    enumerator = OrderedEnumerator(Topology(world_size=1, compute_device="cuda"), 8, constraints)
    options = enumerator.enumerate(model, default_sharders())
    assert {(option.name, option.cache_load_factor) for option in options} == {
        (name, 0.5) for name in ("users", "movies", "history")
    }
    whole = add_cache_params_to_plan(with_caches(load_factor=0.5), tables, {})
    assert whole.plan["pooled"]["users"].cache_params == CacheParams(load_factor=0.5, prefetch_pipeline=True)


def test_sharders_of_the_user_keep_their_own_arguments() -> None:
    sharders: Any = [EmbeddingBagCollectionSharder(fused_params={}), EmbeddingCollectionSharder(fused_params={})]
    assert set(prefetches(shard(make_model(), sharding_plan=with_caches(), sharders=sharders)).values()) == {False}
    with pytest.raises(SetupError, match="both sharders and fused_params="):
        shard(make_model(), sharders=sharders, fused_params={})


@pytest.mark.parametrize(
    ("fused_params", "message"),
    [
        ({"load_factor": 0.1}, "the unknown key load_factor. Remove it; expected one of cache_algorithm"),
        ({"genres": {"cache_load_factor": 0.1}}, "name the table genres, which the model does not have.*history"),
        ({"users": {"users": 1}}, "table users have the unknown key users"),
        ({"cache_algorithm": "fifo"}, "fused_params of table history, algorithm, must be one of LRU, LFU.* got 'fifo'"),
    ],
)
def test_arguments_that_no_kernel_takes_are_refused_with_those_it_takes(fused_params: Any, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        shard(make_model(), fused_params=fused_params)
