"""Where the average of replicas runs: in the named plans, in plans that do not know of it; nowhere without replicas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_pipe.engine import TaskSchedule
from lightning_pipe.recsys import PLANS, recsys_plan, recsys_tasks
from lightning_pipe.recsys.plans.named import evaluation_plan
from lightning_pipe.recsys.tasks.auto_plan import hand_written_plans, propose_plans

REPLICATED = recsys_tasks(replicated=True)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("scaled_late", [False, True])
@pytest.mark.parametrize("balanced", [False, True])
def test_the_average_is_directly_behind_the_backward(plan: str, scaled_late: bool, balanced: bool) -> None:
    tasks = recsys_tasks(scaled_late=scaled_late, balanced=balanced, replicated=True)
    names = [task.name for task in tasks]
    assert names[names.index("EmbBackward") + 1] == "SyncReplicas"
    assert (names[-1] == "SyncReplicas") == scaled_late
    built = recsys_plan(plan, tasks)
    assert built.schedule["SyncReplicas"] == TaskSchedule(globally_ordered=plan == "threaded_input")
    assert built.order.index("SyncReplicas") == built.order.index("EmbBackward") + 1


@pytest.mark.parametrize("plan", PLANS)
def test_the_next_lookup_waits_for_the_average_but_where_it_does_not_wait_for_the_backward(plan: str) -> None:
    built = recsys_plan(plan, REPLICATED)
    waits = {(one.upstream, one.distance) for one in built.dependencies if one.downstream == "EmbForward"}
    assert ("SyncReplicas", 2 if plan == "semi_sync" else 1) in waits
    assert (("SyncReplicas", 1) in waits) == (plan != "semi_sync")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("late", [False, True])
def test_a_plan_in_yaml_gets_the_same_place_and_loses_it_again(plan: str, late: bool, tmp_path: Path) -> None:
    without, replicated = (recsys_tasks(scaled_late=late, replicated=one) for one in (False, True))
    path = tmp_path / "plan.yaml"
    path.write_text(recsys_plan(plan, without).to_yaml(), encoding="utf-8")
    assert recsys_plan(path, replicated).description() == recsys_plan(plan, replicated).description()
    path.write_text(recsys_plan(plan, replicated).to_yaml(), encoding="utf-8")
    assert recsys_plan(path, replicated).description() == recsys_plan(plan, replicated).description()
    assert recsys_plan(path, without).description() == recsys_plan(plan, without).description()


@pytest.mark.parametrize("plan", PLANS)
def test_evaluation_has_no_average(plan: str) -> None:
    assert "SyncReplicas" not in evaluation_plan(recsys_plan(plan, REPLICATED), recsys_tasks()).tasks


def test_plans_are_found_with_it() -> None:
    own = {task.name: 1e-3 for task in REPLICATED}
    by_hand = hand_written_plans(REPLICATED)
    plans = propose_plans(by_hand, own, 0.0, max_in_flight=3, peers=True, device=torch.device("cpu"), keep=3)
    assert plans
    for plan in [*plans, *by_hand]:
        assert list(plan.tasks) == [task.name for task in REPLICATED]
        assert plan.schedule["SyncReplicas"] == TaskSchedule(globally_ordered=plan.name == "threaded_input")
