"""The simulator against figures worked out by hand, and against what must hold for any plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, PlanError, SWPipeline, TaskSchedule
from lightning_pipe.engine.observe.timeline import BACKGROUND, TASK, Bar, Timeline
from lightning_pipe.engine.planning.costs import Machine, TaskCost
from lightning_pipe.engine.planning.network import Collective, NetworkModel
from lightning_pipe.engine.planning.simulation import SimulatedRun, simulate
from tests.engine.random_plans import World, build, random_schedules, random_tasks
from tests.engine.synthetic import random_graph
from tests.engine.within import within
from tests.patience import HANG


def nothing(ctx: IterContext) -> None:
    """The task's function: simulations never call it."""


def task(name: str, reads: Iterable[str] = (), writes: Iterable[str] = ()) -> PipelineTask:
    return PipelineTask(name, nothing, reads=reads, writes=writes)


def chain(*names: str) -> list[PipelineTask]:
    """Each reads what the one before writes."""
    return [task(name, [f"x{index}"], [f"x{index + 1}"]) for index, name in enumerate(names)]


def seconds(plan: PipelinePlan, costs: Mapping[str, Any], machine: Machine | None = None, **options: Any) -> float:
    return run(plan, costs, machine, **options).seconds_per_iteration


def run(plan: PipelinePlan, costs: Mapping[str, Any], machine: Machine | None = None, **options: Any) -> SimulatedRun:
    full = {name: cost if isinstance(cost, TaskCost) else TaskCost(cost) for name, cost in costs.items()}
    return simulate(plan, full, machine, **options)


# ---------------------------------------------------------------------- worked out by hand


@pytest.mark.parametrize(("ahead", "expected"), [(3.0, 5.0), (7.0, 7.0)])
def test_work_ahead_in_a_worker_costs_what_it_takes_longer_than_the_rest(ahead: float, expected: float) -> None:
    fetch, train = chain("fetch", "train")
    plan = PipelinePlan([(fetch, TaskSchedule(1, thread_group="w")), (train, TaskSchedule())])
    assert seconds(plan, {"fetch": ahead, "train": 5.0}) == pytest.approx(expected)


@pytest.mark.parametrize(("cores", "expected"), [(1, 8.0), (1.5, 4 / 0.75), (2, 4.0), (3, 4.0)])
def test_threads_share_cores_evenly(cores: float, expected: float) -> None:
    plan = PipelinePlan(
        [(task("here"), TaskSchedule()), (task("there"), TaskSchedule(thread_group="w"))], order=["there", "here"]
    )
    assert seconds(plan, {"here": 4.0, "there": 4.0}, Machine(cores=cores)) == pytest.approx(expected)


@pytest.mark.parametrize(("background", "expected"), [(4.0, 9.0), (6.0, 9.0), (9.0, 12.0)])
def test_background_work_costs_what_of_it_is_waited_for(background: float, expected: float) -> None:
    start, other, wait = task("start", writes=["h"]), task("other"), task("wait", ["h"])
    plan = PipelinePlan([(one, TaskSchedule()) for one in (start, other, wait)])
    costs = {"start": TaskCost(1.0, "host", background, "network", "wait"), "other": 6.0, "wait": 2.0}
    assert seconds(plan, costs) == pytest.approx(expected)


def test_a_task_can_wait_for_its_own_background_work() -> None:
    plan = PipelinePlan([(task("lookup"), TaskSchedule()), (task("train"), TaskSchedule())])
    costs = {"lookup": TaskCost(2.0, "compute", 3.0, "network", "lookup"), "train": 4.0}
    result = run(plan, costs)
    assert result.seconds_per_iteration == pytest.approx(9.0)
    assert result.utilization == pytest.approx({"compute": 6 / 9 / 2, "network": 3 / 9})
    assert result.exposed == pytest.approx({"lookup": 5.0, "train": 4.0})


def test_a_turn_in_the_global_order_is_held_while_a_task_works_and_not_while_it_waits() -> None:
    one, two = task("one"), task("two")
    plan = PipelinePlan(
        [
            (one, TaskSchedule(thread_group="v", globally_ordered=True)),
            (two, TaskSchedule(thread_group="w", globally_ordered=True)),
        ]
    )
    assert seconds(plan, {"one": 3.0, "two": 4.0}) == pytest.approx(7.0)
    waiting = {"one": TaskCost(1.0, "host", 6.0, "network", "one"), "two": TaskCost(2.0, "disk")}
    assert seconds(plan, waiting) == pytest.approx(7.0)
    waiting["two"] = TaskCost(8.0, "disk")
    assert seconds(plan, waiting) == pytest.approx(9.0)


def test_work_is_bars_of_which_a_timeline_finds_the_critical_path() -> None:
    fetch, train = chain("fetch", "train")
    plan = PipelinePlan([(fetch, TaskSchedule(1, "memcpy", "w")), (train, TaskSchedule())])
    work = run(plan, {"fetch": 3.0, "train": TaskCost(5.0, background=1.0)}, min_iterations=4).bars
    assert [bar.end for bar in work] == sorted(bar.end for bar in work)
    assert Bar(0, "w", "fetch", TASK, 3.0, 6.0, 1) in work
    assert Bar(0, "main", "train", TASK, 3.0, 8.0, 0) in work
    assert Bar(0, "network", "train", BACKGROUND, 8.0, 9.0, 0) in work
    done = [bar for bar in work if bar.kind == TASK and bar.iteration is not None and bar.iteration < 3]
    timeline = Timeline(done, plan.dependencies)
    critical = [
        (timeline.bars[position].name, timeline.bars[position].iteration) for position in timeline.critical_path
    ]
    assert sorted(critical) == [("fetch", 0), ("train", 0), ("train", 1), ("train", 2)]


# ---------------------------------------------------------------------- devices with streams

DEVICE = Machine(cores=1, device_streams=True)


def test_tasks_on_other_streams_overlap_although_one_thread_submits_all() -> None:
    copy, train = chain("copy", "train")
    plan = PipelinePlan([(copy, TaskSchedule(1, "memcpy")), (train, TaskSchedule())])
    costs = {"copy": TaskCost(3.0, "copy"), "train": 5.0}
    assert seconds(plan, costs, DEVICE) == pytest.approx(5.0)
    assert seconds(plan, costs) == pytest.approx(8.0)  # streams mean nothing on a CPU


def test_a_stream_keeps_its_order_and_waits_for_other_streams_events() -> None:
    copy, train = chain("copy", "train")
    costs = {"copy": TaskCost(3.0, "copy"), "train": 5.0}
    same_batch = PipelinePlan([(copy, TaskSchedule(0, "memcpy")), (train, TaskSchedule())])
    # The thread runs ahead: the next copy begins while this batch trains.
    result = run(same_batch, costs, DEVICE, min_iterations=4)
    assert result.seconds_per_iteration == pytest.approx(5.0)
    device = {(bar.name, bar.iteration): (bar.start, bar.end) for bar in result.bars if bar.kind == "device"}
    assert {bar.lane for bar in result.bars if bar.kind == "device"} == {"stream memcpy", "stream current"}
    assert device["copy", 0] == (0.0, 3.0)
    assert device["train", 0] == (3.0, 8.0)
    assert device["copy", 1] == (3.0, 6.0)
    assert device["train", 1] == (8.0, 13.0)
    current = PipelinePlan([(copy, TaskSchedule(1)), (train, TaskSchedule())])
    assert seconds(current, costs, DEVICE) == pytest.approx(8.0)


# ---------------------------------------------------------------------- networks


def test_collectives_take_what_the_formulas_say() -> None:
    network = NetworkModel(latency=1e-3, bandwidth=1e6, ranks=4)
    assert network.seconds(Collective("all_to_all", 8e6)) == pytest.approx(3e-3 + 6.0)
    assert network.seconds(Collective("all_reduce", 8e6)) == pytest.approx(6e-3 + 12.0)
    assert network.seconds(Collective("broadcast", 8e6)) == pytest.approx(5e-3 + 12.0)
    assert network.seconds(Collective("broadcast", 1.0)) == pytest.approx(2e-3 + 2e-6)
    assert NetworkModel(1e-3, 1e6, 1).seconds(Collective("all_reduce", 8e6)) == 0


# ---------------------------------------------------------------------- what holds for any plan


@pytest.mark.parametrize("seed", range(6))
def test_the_steady_state_is_the_mean_over_many_iterations(seed: int) -> None:
    graph = random_graph(seed)
    for plan in graph.variants(keep=12):
        result = simulate(plan, graph.costs, graph.machine)
        assert result.is_steady
        assert max(result.utilization.values()) <= 1 + 1e-9
        retired = simulate(plan, graph.costs, graph.machine, min_iterations=120).iteration_ends
        assert (retired[-1] - retired[39]) / (len(retired) - 40) == pytest.approx(
            result.seconds_per_iteration, rel=0.02
        )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_threads_do_in_the_simulation_what_they_do_in_the_pipeline(data: st.DataObject) -> None:
    tasks = data.draw(random_tasks())
    arguments = data.draw(random_schedules(tasks))
    plan = build(World(), tasks, arguments)
    costs = {name: TaskCost(data.draw(st.integers(0, 5)) * 1e-3, "disk") for name in plan.tasks}
    iterations = 6

    def real() -> dict[str, list[tuple[str, int]]]:
        with SWPipeline(plan) as pipeline:
            pipeline.start_trace()
            source = iter(range(100))
            for _ in range(iterations):
                pipeline.progress(source)
            pipeline.drain()
            spans = sorted(pipeline.stop_trace(), key=lambda span: span.start_order)
        return {
            group: [(span.task, span.iteration) for span in spans if span.thread == group]
            for group in plan.thread_group_names
        }

    found = within(HANG, real, plan)
    simulated = simulate(plan, costs, min_iterations=iterations, max_iterations=iterations).bars
    for group, expected in found.items():
        order = [(bar.name, bar.iteration) for bar in simulated if bar.lane == group]
        started = [work for work in expected if work in order]
        assert order == started[: len(order)]


# ---------------------------------------------------------------------- bad input


def test_costs_that_do_not_fit_say_what_does() -> None:
    first, second = task("first", writes=["x"]), task("second", ["x"])
    apart = task("apart")
    plan = PipelinePlan([(one, TaskSchedule()) for one in (first, second, apart)])
    good: dict[str, Any] = {"first": 1.0, "second": 1.0, "apart": 1.0}
    with pytest.raises(PlanError, match="no cost is given for second, apart"):
        run(plan, {"first": 1.0})
    with pytest.raises(PlanError, match=r"unknown task 'third'.*first, second, apart"):
        run(plan, {**good, "third": 1.0})
    with pytest.raises(
        PlanError, match=r"'apart' is set to wait for .* of 'first', but does not depend on it .*second"
    ):
        run(plan, {**good, "first": TaskCost(1.0, background=1.0, waited_by="apart")})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TaskCost(-1.0), "seconds of a task's cost must be from 0 to 1e\\+06 seconds, got -1.0"),
        (lambda: TaskCost(float("nan")), "got nan"),
        (lambda: TaskCost(1.0, "gpu"), "resource of a task's cost is 'gpu'.*compute, copy"),  # type: ignore[arg-type]
        (lambda: Machine(cores=0), "the machine has 0 cores"),
    ],
)
def test_figures_that_mean_nothing_are_refused(make: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()
