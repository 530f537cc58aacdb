"""The recsys plans: what they say, and that each trains to the bit what the serial one trains."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_pipe.engine import PipelinePlan, PlanError, TaskSchedule
from lightning_pipe.engine.plans.collectives import assign_sequencers, check_collective_order
from lightning_pipe.recsys import PLANS, recsys_plan, recsys_tasks
from lightning_pipe.recsys.plans.recsys_plans import evaluation_plan, with_transfer_on_main
from tests.distributed import run_ranks
from tests.recsys.pipeline_cases import CASES, DEPTHS, STEPS, difference, outcome

Results = list[dict[str, dict[str, bool]]]

# What needs several nodes to be more than what its part within a node is.
ACROSS_NODES = ("table_row_wise", "table_column_wise", "grid_shard")
ON_TWO_RANKS = [
    name for name in CASES if name in ("everything", "TorchRec's DLRM") or name.endswith(("_row_wise", "row_wise"))
]
ON_ONE_RANK = [name for name in CASES if name not in ON_TWO_RANKS]
ON_TWO_NODES = [
    name
    for name in CASES
    if name.endswith(ACROSS_NODES) or name in ("pooled, row_wise", "sequences, column_wise", "everything")
]


def plans_of(name: str) -> list[str]:
    """Those that a case can be trained under: feature processors are read in the lookup."""
    return [plan for plan in DEPTHS if plan != "fused_sparse_dist" or "processed" not in name]


def compare(names: Iterable[str]) -> dict[str, dict[str, bool]]:
    """For each case, what is to be true of it."""
    found = {}
    for name in names:
        runs = {plan: outcome(CASES[name], plan) for plan in plans_of(name)}
        serial, prefetch = runs["serial"], runs["prefetch"]
        found[name] = {
            **{f"{plan} is serial": run.same(serial) for plan, run in runs.items()},
            "all were trained": len(serial.outputs) == STEPS,
            # Not all: some model leaves an output unused.
            "most values moved": 2 * len(difference(serial.initial, serial.values)) > len(serial.initial),
            "in flight": all(run.most_in_flight == DEPTHS[plan] for plan, run in runs.items()),
            "all modules are pipelined": len(prefetch.pipelined)
            == {"everything": 3, "TorchRec's DLRM": 1}.get(name, 2),
        }
    return found


def on_one_node(rank: int, world_size: int) -> dict[str, dict[str, bool]]:
    found = compare(ON_TWO_RANKS)
    for steps in (0, 1, 2):
        serial = outcome(CASES["everything"], "serial", steps)
        for plan in DEPTHS:
            one = outcome(CASES["everything"], plan, steps)
            found[f"{plan}, {steps}"] = {"same": one.same(serial), "trained": len(one.outputs) == steps}
    return found


def on_two_nodes(rank: int, world_size: int) -> dict[str, dict[str, bool]]:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return compare(ON_TWO_NODES)


@pytest.fixture(scope="module")
def two_ranks() -> Results:
    return run_ranks(on_one_node, 2)


@pytest.fixture(scope="module")
def four_ranks() -> Results:
    return run_ranks(on_two_nodes, 4)


def holds(results: Results, case: str) -> None:
    assert [[what for what, is_true in found[case].items() if not is_true] for found in results] == [[]] * len(results)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("case", ON_ONE_RANK)
def test_every_plan_trains_the_same_to_the_bit_on_one_rank(case: str) -> None:
    holds([compare([case])], case)


@pytest.mark.parametrize("case", ON_TWO_RANKS)
def test_every_plan_trains_the_same_to_the_bit_on_two_ranks(two_ranks: Results, case: str) -> None:
    holds(two_ranks, case)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ON_TWO_NODES)
def test_every_plan_trains_the_same_to_the_bit_on_two_nodes_of_two_ranks(four_ranks: Results, case: str) -> None:
    holds(four_ranks, case)


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("plan", DEPTHS)
def test_data_shorter_than_the_depth_is_trained_whole(two_ranks: Results, plan: str, steps: int) -> None:
    holds(two_ranks, f"{plan}, {steps}")


# What the plans say.


@pytest.mark.parametrize("plan", PLANS)
def test_a_named_plan_comes_back_from_yaml(plan: str, tmp_path: Path) -> None:
    tasks = recsys_tasks(scaled_late=True)
    built = recsys_plan(plan, tasks)
    assert built.name == plan
    text = built.to_yaml()
    path = tmp_path / "plan.yaml"
    path.write_text(text, encoding="utf-8")
    for given in (str(path), path, built):
        again = recsys_plan(given, tasks)
        assert again.description() == built.description()
        assert again.to_yaml() == text


def test_only_prefetches_and_the_input_have_a_thread_of_their_own() -> None:
    workers = {
        plan: {
            task: where.thread_group
            for task, where in recsys_plan(plan, recsys_tasks()).schedule.items()
            if where.thread_group != "main"
        }
        for plan in PLANS
    }
    in_threads = {plan: {"EmbPrefetch": "prefetch"} for plan in PLANS if "prefetch" in plan}
    in_threads["threaded_input"] = dict.fromkeys(("H2DAndShuffle", "EmbInputDistStart", "EmbInputDistWait"), "input")
    assert workers == {plan: {} for plan in PLANS} | in_threads


def test_collectives_of_a_threaded_input_are_ordered_among_those_of_the_main_thread() -> None:
    """Those of a balancer and of replicas as well; without a GPU, no task waits for its turn."""
    tasks = recsys_tasks(balanced=True, replicated=True)
    plan = recsys_plan("threaded_input", tasks)
    check_collective_order(plan.name, tasks, plan.schedule, has_streams=True)
    submitting = [task.name for task in tasks if task.collectives]
    assert assign_sequencers(tasks, plan.schedule, has_streams=True) == dict.fromkeys(submitting, 0)
    assert assign_sequencers(tasks, plan.schedule, has_streams=False) == {}


def test_a_transfer_can_be_moved_to_the_main_thread_and_the_input_dist_stays_in_its_own() -> None:
    plan = with_transfer_on_main(recsys_plan("threaded_input", recsys_tasks()))
    assert plan.schedule["H2DAndShuffle"] == TaskSchedule(1, "input")
    assert plan.schedule["EmbInputDistStart"].thread_group == "input"
    base = recsys_plan("base", recsys_tasks())
    assert with_transfer_on_main(base) is base


@pytest.mark.parametrize("plan", PLANS)
def test_where_gradients_are_scaled_late_the_tables_backward_follows_the_optimizer_step(plan: str) -> None:
    order = recsys_plan(plan, recsys_tasks(scaled_late=True)).order
    assert order.index("EmbBackward") == order.index("OptimStep") + 1
    looked_up_after = order.index("EmbForward") > order.index("EmbBackward")
    assert looked_up_after == (plan == "fused_sparse_dist")


@pytest.mark.parametrize("plan", PLANS)
def test_lookups_wait_for_the_tables_of_the_batch_before_or_say_that_they_do_not(plan: str) -> None:
    built = recsys_plan(plan, recsys_tasks())
    before = {
        (dependency.upstream, dependency.distance)
        for dependency in built.dependencies
        if dependency.downstream == "EmbForward" and dependency.distance
    }
    assert before == {("EmbBackward", 2 if PLANS[plan].stale else 1)}
    assert [str(one).partition(" (")[0] for one in built.stale] == (
        ["EmbForward after EmbBackward of 1 iteration(s) before"] if plan == "semi_sync" else []
    )


# The tasks of a balancer, and the average of replicas, which only some models have.


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("scaled_late", [False, True])
def test_samples_are_exchanged_before_the_input_dist_and_replicas_averaged_after_the_backward(
    plan: str, scaled_late: bool
) -> None:
    tasks = recsys_tasks(scaled_late=scaled_late, balanced=True, replicated=True)
    built = recsys_plan(plan, tasks)
    copy, input_dist = built.schedule["H2DAndShuffle"], built.schedule["EmbInputDistStart"]
    for task in ("BalanceStart", "BalanceFinish"):
        assert built.schedule[task] == replace(input_dist, stage=copy.stage)
    assert built.order.index("SyncReplicas") == built.order.index("EmbBackward") + 1
    waits = {(one.upstream, one.distance) for one in built.dependencies if one.downstream == "EmbForward"}
    assert (("SyncReplicas", 1) in waits) == (plan != "semi_sync")
    evaluated = evaluation_plan(built, recsys_tasks()).tasks
    assert {"BalanceStart", "BalanceFinish", "SyncReplicas"}.isdisjoint(evaluated)


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_in_yaml_gets_these_tasks_and_loses_them_again(plan: str, tmp_path: Path) -> None:
    without, extended = recsys_tasks(), recsys_tasks(balanced=True, replicated=True)
    path = tmp_path / "plan.yaml"
    for written in (without, extended):
        path.write_text(recsys_plan(plan, written).to_yaml(), encoding="utf-8")
        assert recsys_plan(path, extended).description() == recsys_plan(plan, extended).description()
        assert recsys_plan(path, without).description() == recsys_plan(plan, without).description()


def test_another_batch_runs_forward_between_the_gather_and_the_exchange() -> None:
    order = recsys_plan("prefetch", recsys_tasks(balanced=True)).order
    between = order[order.index("BalanceStart") : order.index("BalanceFinish")]
    assert {"EmbForward", "DenseForward"} <= set(between)


# What is refused.


@pytest.mark.parametrize(
    "plan", ["prefetched", "no/such/plan.yaml", "", "name: too long for a path\n" * 200, True, None]
)
def test_what_is_no_plan_is_refused_with_the_names_that_are(plan: Any) -> None:
    with pytest.raises(PlanError, match=f"neither one of {', '.join(PLANS)} nor a file"):
        recsys_plan(plan, recsys_tasks())


def edited(old: str, new: str) -> str:
    text = recsys_plan("prefetch", recsys_tasks()).to_yaml()
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("pipeline_depth: 3", "pipeline_dept: 3", "unknown key 'pipeline_dept'"),
        ("pipeline_depth: 3", "pipeline_depth: 2", "pipeline_depth 2"),
        ("{stage: 2, stream: memcpy}", "{stag: 2}", "unknown key 'stag'"),
        ("  OptimStep: {}\n", "", r"leaves out OptimStep\. Add `OptimStep: {}`"),
        ("  OptimStep: {}\n", "  OptimStep: {}\n  Evaluate: {}\n", r"unknown task 'Evaluate'.* pass it as extra_tasks"),
        ("  EmbForward: {}\n", "  EmbForward: {stage: 2}\n", "drops a required dependency"),
        ("  EmbInputDistStart: {stage: 2", "  EmbInputDistStart: {stage: 3", "lower"),
        ("  EmbForward: {}\n", "  EmbForward: {thread_group: own}\n", "'EmbForward' to thread group 'own'"),
        (
            "{stage: 2, stream: data_dist}",
            "{stage: 2, thread_group: own}",
            "the process group 'input' from the thread groups own, main",
        ),
    ],
)
def test_a_plan_that_cannot_run_is_refused_by_name(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(edited(old, new), encoding="utf-8")
    with pytest.raises(PlanError, match=says):
        recsys_plan(path, recsys_tasks())


@pytest.mark.parametrize("name", PLANS)
def test_an_evaluation_runs_its_tasks_as_far_ahead_as_training_with_the_dense_part_last(name: str) -> None:
    training = recsys_plan(name, recsys_tasks())
    plan = evaluation_plan(training, recsys_tasks())
    assert plan.order[-1] == "DenseForward"
    assert {"DenseBackward", "OptimStep", "LossPostprocess"}.isdisjoint(plan.tasks)
    assert {task: training.schedule[task] for task in plan.schedule} == plan.schedule
    assert plan.pipeline_depth == training.max_stage + 1


def test_an_evaluation_keeps_what_a_plan_adds_between_its_tasks() -> None:
    text = edited("order:", "deps:\n- [EmbInputDistStart, EmbPrefetch]\n- [EmbPrefetch, OptimStep]\norder:")
    plan = evaluation_plan(PipelinePlan.from_yaml(text, recsys_tasks()), recsys_tasks())
    assert [(one.upstream, one.downstream) for one in plan.deps] == [("EmbInputDistStart", "EmbPrefetch")]
