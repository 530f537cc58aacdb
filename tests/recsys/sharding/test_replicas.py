"""Replicas of sharded tables: as synchronous training where they step alike, as its simulation where they do not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardingPlan

from lightning_pipe.engine.common.errors import InputError, PlanError, SetupError
from lightning_pipe.recsys import DynamicEmbeddingBagCollection, DynamicTable, ShardedModel, TrainPipeline
from lightning_pipe.recsys.sharding.replicas import ReplicaGroups, make_replica_groups
from tests.distributed import run_ranks
from tests.recsys.pipeline_cases import (
    CASES,
    STEPS,
    Case,
    Mixed,
    Paired,
    adam,
    difference,
    grouped,
    mixed_batches,
    same_outputs,
    sharded,
    train,
    values_of,
)
from tests.recsys.rewrite_cases import Bags, Processed, batches
from tests.recsys.sharding_cases import (
    ADAGRAD,
    CPU,
    MOVIES,
    ROW_WISE_ADAGRAD,
    apply_in_backward,
    constraints_for,
    make_batch,
    make_model,
    shard,
    tables_of,
)
from tests.tiers import sampled

KINDS = [
    ("table_wise", "table_wise"),
    ("row_wise", "row_wise"),
    ("column_wise", "column_wise"),
    ("table_column_wise", "table_wise"),
]
OPTIMIZERS = {"adagrad": ADAGRAD, "row_wise_adagrad": ROW_WISE_ADAGRAD}
PLANS = ("base", "prefetch", "fused_sparse_dist")
PIPELINED = {
    "pooled and sequences": Case(
        Mixed,
        mixed_batches,
        {"people": "column_wise", "things": "row_wise", "tags": "table_wise", "past": "row_wise"},
    ),
    "processed features": Case(lambda: Paired(Processed()), kinds="table_wise"),
}


def groups_of(count: int, sync_every: int | None = None) -> ReplicaGroups:
    groups = make_replica_groups(count, sync_every)
    assert groups is not None
    return groups


def step(model: ShardedModel, number: int, rank: int) -> None:
    model.module(*make_batch(number, rank)).backward()
    assert model.replicas is not None
    model.replicas.step()


def from_one_model(rank: int, kinds: tuple[str, str]) -> float:
    """The greatest difference from tables that are sharded over all ranks, by SGD."""
    replicated = shard(make_model(), constraints=constraints_for(*kinds), replicas=groups_of(2))
    reference = shard(make_model(), constraints=constraints_for(*kinds))
    before = reference.full_table(MOVIES)
    for number in range(5):
        step(replicated, number, rank)
        reference.module(*make_batch(number, rank)).backward()
    assert float((reference.full_table(MOVIES) - before).abs().max()) > 1e-3
    return max(
        float((replicated.full_table(name) - reference.full_table(name)).abs().max()) for name in reference.tables
    )


def from_simulation(rank: int, world_size: int, optimizer: str, kinds: tuple[str, str]) -> dict[str, float]:
    """Trains seven steps, averaged every three, and an unsharded copy for each replica; and how far replicas differ.

    Returns:
        The greatest differences from the copy of this rank's replica: of tables, and of states; the difference between
        the copies; and the difference from their mean after ``sync_replicas``.
    """
    size = world_size // 2
    model = shard(
        make_model(),
        sparse_optimizer=OPTIMIZERS[optimizer],
        constraints=constraints_for(*kinds),
        replicas=groups_of(2, 3),
    )
    copies = [make_model(), make_model()]
    for one in copies:
        apply_in_backward(one, OPTIMIZERS[optimizer])
    for number in range(7):
        step(model, number, rank)
        for index, one in enumerate(copies):
            ranks = range(index * size, (index + 1) * size)
            torch.stack([one(*make_batch(number, other)) for other in ranks]).mean().backward()
        if number % 3 == 2:
            average(copies)
    found = {"tables": 0.0, "states": 0.0, "apart": 0.0, "together": 0.0}
    own = tables_of(copies[rank // size])

    def note(what: str, one: torch.Tensor, other: torch.Tensor) -> None:
        found[what] = max(found[what], float((one.reshape(other.shape) - other).abs().max()))

    for name in model.tables:
        note("tables", model.full_table(name), own[name].detach())
        note("states", model.full_table_optimizer_state(name)["momentum1"], accumulated(own[name]))
        note("apart", *(tables_of(one)[name].detach() for one in copies))
    average(copies)
    model.sync_replicas()
    for name in model.tables:
        note("together", model.full_table(name), own[name].detach())
        note("together", model.full_table_optimizer_state(name)["momentum1"], accumulated(own[name]))
    return found


def accumulated(parameter: nn.Parameter) -> torch.Tensor:
    state: torch.Tensor = parameter._in_backward_optimizers[0].state[parameter]["sum"]  # type: ignore[attr-defined]
    return state


@torch.no_grad()
def average(copies: list[nn.Module]) -> None:
    for parameters in zip(*(tables_of(one).values() for one in copies), strict=True):
        for tensors in (parameters, [accumulated(one) for one in parameters]):
            mean = torch.stack([one.detach() for one in tensors]).mean(0)
            for one in tensors:
                one.copy_(mean)


def trained(case: Case, plan: str, groups: ReplicaGroups, **arguments: Any) -> tuple[list[Any], dict[str, Any], Any]:
    model = sharded(case, replicas=groups)
    optimizer = adam(model)
    torch.manual_seed(13 + dist.get_rank())
    pipeline = TrainPipeline(model, optimizer, CPU, plan, **grouped(arguments))
    outputs, _ = train(pipeline, case.data(STEPS))
    pipelined = pipeline.rewrite.pipelined
    pipeline.close()
    return outputs, values_of(model, optimizer), pipelined


def plans_alike() -> dict[str, bool]:
    found = {}
    for name, case in PIPELINED.items():
        for every in (1, 3):
            groups = groups_of(2, every)
            outputs, values, _ = trained(case, "serial", groups)
            # Neither look-ahead where it is refused.
            left = PLANS[:2] if every > 1 or name == "processed features" else PLANS
            for plan in left:
                others, other_values, pipelined = trained(case, plan, groups)
                same = same_outputs(outputs, others) and not difference(values, other_values)
                found[f"{name}, {plan}, {every}"] = same and bool(pipelined)
    return found


def bad_batch(rank: int, world_size: int) -> dict[str, tuple[str, int]]:
    """The last rank's third batch has no label that could be moved; what each rank raises, and had trained by then."""
    found = {}
    for plan in ("serial", *PLANS):
        model = sharded(CASES["pooled, table_wise"], replicas=groups_of(2))
        data: list[Any] = batches(STEPS)
        if rank == world_size - 1:
            data[2].sparse = object()
        pipeline = TrainPipeline(model, adam(model), CPU, plan)
        count, feed = 0, iter(data)
        try:
            while True:
                pipeline.progress(feed)
                count += 1
        except InputError as error:
            found[plan] = str(error), count
        pipeline.close()
    return found


def evaluated_together(rank: int) -> bool:
    """Between two averages, evaluation is of one model: the same outputs for the same batches in both replicas."""
    model = sharded(PIPELINED["pooled and sequences"], replicas=groups_of(2, 5))
    pipeline = TrainPipeline(model, adam(model), CPU, "prefetch")
    feed = iter(mixed_batches(4))
    for _ in range(2):
        pipeline.progress(feed)
    apart = gathered(model.full_table("things"))
    list(pipeline.evaluate(iter(mixed_batches(1))))
    together = gathered(model.full_table("things"))
    pipeline.close()
    return not torch.equal(*apart) and torch.equal(*together)


def gathered(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the first rank and the last."""
    tables = [torch.empty_like(table) for _ in range(dist.get_world_size())]
    dist.all_gather(tables, table)
    return tables[0], tables[-1]


class Dynamic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = DynamicEmbeddingBagCollection(
            [DynamicTable(name="users", embedding_dim=8, feature_names=["user"], cache_rows=64)], "unused"
        )


def refusals(rank: int, world_size: int) -> dict[str, str]:
    groups = groups_of(2)
    plan = shard(make_model(), replicas=groups, constraints=constraints_for("table_wise")).dmp.plan
    cached = copy.deepcopy(plan)
    cached.plan["pooled"]["users"].compute_kernel = "fused_uvm_caching"
    clipped = shard(Bags(), replicas=groups)
    attempts: dict[str, Any] = {
        "three": lambda: make_replica_groups(3),
        "steps": lambda: make_replica_groups(2, 0),
        "others": lambda: make_replica_groups(2, 1 + rank),
        "cached": lambda: shard(make_model(), replicas=groups, sharding_plan=cached),
        "dynamic": lambda: shard(Dynamic(), replicas=groups),
        "clipped": lambda: TrainPipeline(clipped, adam(clipped), CPU, max_norm=1.0),
        "ahead": lambda: TrainPipeline(
            (model := sharded(CASES["pooled, table_wise"], replicas=groups_of(2, 2))),
            adam(model),
            CPU,
            "fused_sparse_dist",
        ),
        **{
            kind: lambda kind=kind: shard(make_model(), replicas=groups, constraints=constraints_for(kind))
            for kind in ("table_row_wise", "data_parallel")
        },
    }
    found = {}
    for name, attempt in attempts.items():
        with pytest.raises((SetupError, PlanError)) as caught:
            attempt()
        found[name] = str(caught.value)
    return found


def planned(rank: int) -> list[str]:
    """What the planner chooses where nothing is said."""
    model = shard(make_model(), sparse_optimizer=ADAGRAD, replicas=groups_of(2))
    assert isinstance(model.dmp.plan, ShardingPlan)
    return [table.sharding_type for table in model.tables.values()]


def everything(rank: int, world_size: int) -> dict[str, Any]:
    """In one go: it takes ten times as long to start the processes as to try one case in them."""
    return {
        "one model": {kinds: from_one_model(rank, kinds) for kinds in KINDS},
        "simulation": {
            **{("adagrad", *kinds): from_simulation(rank, world_size, "adagrad", kinds) for kinds in KINDS[:3]},
            ("row_wise_adagrad", *KINDS[1]): from_simulation(rank, world_size, "row_wise_adagrad", KINDS[1]),
        },
        "plans": plans_alike(),
        "bad batch": bad_batch(rank, world_size),
        "evaluated together": evaluated_together(rank),
        "refusals": refusals(rank, world_size),
        "planned": planned(rank),
    }


@pytest.fixture(scope="module", params=sampled([2, 4], lambda ranks: ranks == 2, "world_{}".format))
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank found, of two replicas over one or two ranks each."""
    return run_ranks(everything, request.param)


def test_sgd_with_an_average_in_every_step_is_training_over_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert {kinds: value for kinds, value in found["one model"].items() if not value < 1e-6} == {}


def test_replicas_train_apart_between_averages_of_tables_and_states(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for case, differences in found["simulation"].items():
            assert differences["tables"] < 1e-6, case
            assert differences["states"] < 1e-6, case
            assert differences["together"] < 1e-6, case
            assert differences["apart"] > 1e-3, case


def test_plans_train_replicas_as_the_serial_one_to_the_bit(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert [name for name, holds in found["plans"].items() if not holds] == []
        assert len(found["plans"]) == 9


def test_a_bad_batch_in_one_replica_is_an_error_in_all(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["bad batch"].keys() == {"serial", *PLANS}
        for plan, (message, count) in found["bad batch"].items():
            assert f"rank {len(ranks) - 1}" in message
            assert count == ranks[0]["bad batch"][plan][1] <= 2


def test_evaluation_is_of_the_average(ranks: list[dict[str, Any]]) -> None:
    assert all(found["evaluated together"] for found in ranks)


def test_the_planner_leaves_out_what_replicas_cannot_have(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["planned"] == ranks[0]["planned"]
        assert not {"table_row_wise", "grid_shard", "data_parallel"} & set(found["planned"])


def test_what_replicas_cannot_have_is_refused_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    wanted = {
        "three": f"replicas must be a divisor of the number of ranks, {len(ranks)}, got 3",
        "steps": "sync_every is 0; expected a whole number, 1 or more",
        "others": "rank 0 has 'sync_every' = '1', but rank 1 has 'sync_every' = '2'",
        "cached": "the compute kernel fused_uvm_caching, whose cache is not averaged",
        "dynamic": "is a dynamic table and cannot have replicas",
        "clipped": "gradients cannot be clipped with 2 replicas of tables",
        "ahead": "looks up batches ahead of their turn, but the lookups of this model also read replica_steps",
        "table_row_wise": "names table_row_wise for table pooled.embedding_bags.users.weight",
        "data_parallel": "names data_parallel for table pooled.embedding_bags.users.weight",
    }
    for found in ranks:
        assert found["refusals"].keys() == wanted.keys()
        for name, text in wanted.items():
            assert text in found["refusals"][name]
