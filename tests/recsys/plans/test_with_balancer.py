"""Where a balancer's tasks run: in the named plans, in plans that do not know of them; nowhere without a balancer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_pipe.engine import PlanError
from lightning_pipe.recsys import PLANS, recsys_plan, recsys_tasks
from lightning_pipe.recsys.plans.named import evaluation_plan
from lightning_pipe.recsys.tasks.auto_plan import hand_written_plans, propose_plans

BALANCED = recsys_tasks(balanced=True)
BALANCING = ("BalanceStart", "BalanceFinish")


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("scaled_late", [False, True])
def test_the_exchange_is_between_the_copy_and_the_input_dist(plan: str, scaled_late: bool) -> None:
    tasks = recsys_tasks(scaled_late=scaled_late, balanced=True)
    names = [task.name for task in tasks]
    assert names[:4] == ["H2DAndShuffle", *BALANCING, "EmbInputDistStart"]
    built = recsys_plan(plan, tasks)
    copy, input_dist = built.schedule["H2DAndShuffle"], built.schedule["EmbInputDistStart"]
    for task in BALANCING:
        assert built.schedule[task] == replace(input_dist, stage=copy.stage)


@pytest.mark.parametrize("plan", ["base", "prefetch"])
def test_another_batch_runs_forward_between_the_gather_and_the_exchange(plan: str) -> None:
    order = recsys_plan(plan, BALANCED).order
    between = order[order.index("BalanceStart") : order.index("BalanceFinish")]
    assert {"EmbForward", "DenseForward"} <= set(between)
    assert order[order.index("BalanceFinish") + 1] == "LossPostprocess"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("late", [False, True])
def test_a_plan_in_yaml_gets_the_same_places_and_loses_them_again(plan: str, late: bool, tmp_path: Path) -> None:
    without, balanced = (recsys_tasks(scaled_late=late, balanced=one) for one in (False, True))
    path = tmp_path / "plan.yaml"
    path.write_text(recsys_plan(plan, without).to_yaml(), encoding="utf-8")
    assert recsys_plan(path, balanced).description() == recsys_plan(plan, balanced).description()
    path.write_text(recsys_plan(plan, balanced).to_yaml(), encoding="utf-8")
    assert recsys_plan(path, balanced).description() == recsys_plan(plan, balanced).description()
    assert recsys_plan(path, without).description() == recsys_plan(plan, without).description()


def test_a_plan_without_an_order_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("tasks: {" + ", ".join(f"{task.name}: " for task in recsys_tasks()) + "}\n", encoding="utf-8")
    assert recsys_plan(path, BALANCED).order == tuple(task.name for task in BALANCED)


def test_one_of_the_two_alone_is_an_error(tmp_path: Path) -> None:
    text = recsys_plan("serial", BALANCED).to_yaml()
    path = tmp_path / "plan.yaml"
    path.write_text("\n".join(line for line in text.splitlines() if "BalanceStart: {" not in line), encoding="utf-8")
    with pytest.raises(PlanError, match="leaves out BalanceStart"):
        recsys_plan(path, BALANCED)


@pytest.mark.parametrize("plan", PLANS)
def test_evaluation_is_not_balanced(plan: str) -> None:
    found = evaluation_plan(recsys_plan(plan, BALANCED), recsys_tasks())
    assert not set(BALANCING) & set(found.tasks)


def test_plans_are_found_with_them() -> None:
    own = {task.name: 1e-3 for task in BALANCED}
    by_hand = hand_written_plans(BALANCED)
    plans = propose_plans(by_hand, own, 0.0, max_in_flight=3, peers=True, device=torch.device("cpu"), keep=3)
    assert plans
    for plan in [*plans, *by_hand]:
        assert list(plan.tasks) == [task.name for task in BALANCED]
        for task in BALANCING:
            assert plan.schedule[task].thread_group == plan.schedule["EmbInputDistStart"].thread_group
