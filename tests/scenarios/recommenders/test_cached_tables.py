"""Tables with a cache of rows under every plan. A CPU has no cache: the kernels only get the arguments of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan

from lightning_pipe.engine import SetupError
from lightning_pipe.recsys import TrainPipeline
from lightning_pipe.recsys.kernels.fused_kernels import find_fused_kernels
from lightning_pipe.recsys.plans.recsys_plans import recsys_plan
from lightning_pipe.recsys.sharding.shard_model import shard_model
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from lightning_pipe.recsys.tasks.auto_plan import hand_written_plans, propose_plans
from lightning_pipe.recsys.tasks.task_list import recsys_tasks
from lightning_pipe.strategies import RecsysPipelineStrategy
from tests.recsys.sharding.test_sharding_plan import one_shard
from tests.strategies.cases import ADAGRAD, Clicks, difference, fit, loader, recsys, state_of

QUICK = {"iterations": 1, "rounds": 1, "max_generated": 2, "extra_rounds": 0}
TWO_AHEAD = Path(__file__).parents[3] / "benchmarks" / "prefetch_two_ahead.yaml"


def cached_plan(kernel: str = "fused_uvm_caching") -> ShardingPlan:
    def cached() -> ParameterSharding:
        return ParameterSharding("table_wise", kernel, [0], one_shard(24, 8))

    tables = EmbeddingModuleShardingPlan({"people": cached(), "things": cached()})
    return ShardingPlan({"network.bags": tables})


def prefetch_ahead(sharded: ShardedModel) -> list[bool]:
    return [
        kernel.prefetch_pipeline and kernel.lock_cache_line
        for module in sharded.sharded_modules.values()
        for kernel in find_fused_kernels(module)
    ]


def trained(plan: Any, tables: ShardingPlan | None = None, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    used = fit(Clicks(), recsys(plan, sharding={"plan": tables}, **options), train=loader(128), max_epochs=1)
    assert isinstance(used.strategy, RecsysPipelineStrategy)
    return state_of(used), used.strategy.sharded_model


@pytest.mark.parametrize("plan", ["threaded_input", "prefetch", "auto"])
def test_every_plan_trains_tables_with_a_cache_that_are_made_for_prefetches_ahead(plan: str) -> None:
    search = {"auto": {"exploration": QUICK}} if plan == "auto" else {}
    state, sharded = trained(plan, cached_plan(), **search)
    assert set(prefetch_ahead(sharded)) == {True}
    assert difference(state, trained("serial", cached_plan("fused"))[0]) == []


@pytest.mark.usefixtures("one_rank")
def test_a_train_pipeline_s_tables_are_made_for_prefetches_ahead() -> None:
    model = Clicks().network
    tables = ShardingPlan({"bags": cached_plan().plan["network.bags"]})
    sharded = shard_model(
        model, device=torch.device("cpu"), group=new_world(), sparse_optimizer=ADAGRAD, sharding_plan=tables
    )
    assert set(prefetch_ahead(sharded)) == {True}
    with pytest.raises(SetupError, match="plan 'semi_sync' looks up a batch before"):
        TrainPipeline(sharded, torch.optim.SGD(model.parameters(), lr=0.1), "cpu", plan="semi_sync")


def new_world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


@pytest.mark.parametrize("plan", ["semi_sync", TWO_AHEAD], ids=["semi_sync", "two_ahead"])
def test_plans_that_a_cache_cannot_follow_are_refused_with_the_tables(plan: Any) -> None:
    said = (
        r"before the backward of the previous batch, or prefetches two .*tables people, things have the compute kernel"
    )
    with pytest.raises(SetupError, match=said):
        trained(plan, cached_plan())
    trained(plan)  # without a cache


def test_a_search_proposes_no_plan_that_a_cache_cannot_follow() -> None:
    tasks = recsys_tasks()
    own = {**{task.name: 0.01 for task in tasks}, "EmbPrefetch": 1.0}
    by_hand = [*hand_written_plans(tasks), recsys_plan(TWO_AHEAD, tasks)]

    def stages(cached: bool) -> set[int]:
        arguments: Any = {"max_in_flight": 5, "peers": True, "device": torch.device("cpu"), "max_plans": 50}
        plans = propose_plans(by_hand, own, 0.0, cached=cached, **arguments)
        assert plans
        return {plan.schedule["EmbPrefetch"].stage for plan in plans}

    assert max(stages(cached=False)) > 1
    assert max(stages(cached=True)) <= 1
