from __future__ import annotations

import pytest

from lightning_pipe.engine import PipelinePlan, PipelineTask, TaskSchedule
from lightning_pipe.engine.planning.costs import Machine, TaskCost
from lightning_pipe.engine.planning.network import Collective, NetworkModel
from lightning_pipe.engine.planning.prediction import find_scaling_break, predict_plan_performance


def exchange(latency: float, bandwidth: float) -> tuple[PipelinePlan, dict[str, TaskCost], Machine]:
    """Training with an all-to-all that takes a tenth of it on two ranks, and an all-reduce behind."""
    names = ("Send", "Train", "Reduce")
    tasks = [
        PipelineTask(name, lambda ctx: None, reads=[f"x{at}"], writes=[f"x{at + 1}"]) for at, name in enumerate(names)
    ]
    plan = PipelinePlan([(task, TaskSchedule()) for task in tasks], name="plain")
    costs = {
        "Send": TaskCost(0.0, background=Collective("all_to_all", 1e6), waited_by="Train"),
        "Train": TaskCost(0.01),
        "Reduce": TaskCost(0.0, background=Collective("all_reduce", 1e3), waited_by="Reduce"),
    }
    return plan, costs, Machine(cores=1, network=NetworkModel(latency, bandwidth, 2))


def test_a_plan_breaks_at_the_first_power_of_two_that_costs_a_tenth_more() -> None:
    plan, costs, machine = exchange(latency=1e-5, bandwidth=1e9)
    found = find_scaling_break(plan, costs, machine, 2, 4096)
    # 10.53 ms with two ranks; 11.39 with 16, 11.90 with 32: the all-to-all has grown by 0.77, the all-reduce by 0.60.
    assert found.ranks == 32
    assert found.seconds == pytest.approx(10e-3 + (31e-5 + 31 / 32 * 1e-3) + 2 * (31e-5 + 31 / 32 * 1e-6))
    assert found.task == "Send"
    assert found.grown == pytest.approx(30e-5 + (31 / 32 - 1 / 2) * 1e-3)
    assert found.latency == pytest.approx(31e-5 / (31e-5 + 31 / 32 * 1e-3))


def test_a_plan_that_does_not_break_is_told_with_its_time_at_the_end() -> None:
    plan, costs, machine = exchange(latency=0.0, bandwidth=1e12)
    found = find_scaling_break(plan, costs, machine, 2, 4096)
    assert (found.ranks, found.task) == (None, "")
    assert found.seconds == pytest.approx(0.01, rel=0.01)


def test_exposed_time_of_a_resource_is_what_the_iteration_is_shorter_without_it() -> None:
    plan, costs, machine = exchange(latency=1e-5, bandwidth=1e9)
    found = predict_plan_performance(plan, costs, machine)
    assert found.exposed["network"] == pytest.approx(found.seconds - 0.01)
    assert found.exposed["compute"] == pytest.approx(0.01)
    assert found.busiest == "compute"
