"""Whatever the tasks and the plan: results, order, depth and end are those of serial execution, and nothing hangs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_pipe.engine import PipelinePlan, SWPipeline, TaskSpan
from tests.engine.fake_device import fake_device
from tests.engine.random_plans import Declared, World, build, conflicts, random_schedules, random_tasks, run_serially
from tests.engine.within import within
from tests.patience import HANG

random_runs = settings(
    max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)


@pytest.fixture(autouse=True)
def _threads_take_turns_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def train(
    plan: PipelinePlan, epochs: list[list[int]], stepwise: list[str], device: str = "cpu"
) -> tuple[list[int], list[TaskSpan], int]:
    """Iterations retired, spans, and the most batches in flight at once."""
    most = 0

    def watch(iterator: Iterator[int]) -> Iterator[int]:
        nonlocal most
        for batch in iterator:
            yield batch
            most = max(most, len(pipeline.in_flight))
        most = max(most, len(pipeline.in_flight))

    retired = []
    with SWPipeline(plan, device=device) as pipeline:
        pipeline.start_trace()
        for epoch in epochs:
            data = watch(iter(epoch))
            while True:
                try:
                    if stepwise:
                        pipeline.begin_period(data)
                        for task in stepwise:
                            pipeline.run_until(task)
                        retired.append(pipeline.finish_period().iter_idx)
                    else:
                        retired.append(pipeline.progress(data).iter_idx)
                except StopIteration:
                    break
        return retired, pipeline.stop_trace(), most


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Declared], dict[str, Any], list[list[int]], list[str]]:
    tasks = draw(random_tasks())
    arguments = draw(random_schedules(tasks))
    epochs = draw(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=2))
    stepwise = draw(st.lists(st.sampled_from([declared.name for declared in tasks]), max_size=2))
    return tasks, arguments, epochs, stepwise


@random_runs
@given(runs())
def test_a_valid_plan_gives_what_serial_execution_gives(
    run: tuple[list[Declared], dict[str, Any], list[list[int]], list[str]],
) -> None:
    tasks, arguments, epochs, stepwise = run
    batches = [batch for epoch in epochs for batch in epoch]
    expected = run_serially(tasks, batches)
    world = World()
    plan = build(world, tasks, arguments)
    retired, spans, most = within(HANG, lambda: train(plan, epochs, stepwise), run)
    assert retired == list(range(len(batches)))
    assert world.computed == expected.computed
    assert world.state == expected.state
    assert most <= plan.pipeline_depth
    # By the recorded order too, since a race need not show in the results.
    at = {(span.task, span.iteration): span for span in spans}
    for before, after in conflicts(tasks, len(batches)):
        assert at[before].end_order < at[after].start_order


@random_runs
@given(runs())
def test_collectives_of_ordered_tasks_are_submitted_in_the_plans_order(
    run: tuple[list[Declared], dict[str, Any], list[list[int]], list[str]],
) -> None:
    tasks, arguments, epochs, stepwise = run
    epochs = epochs[:1]
    world = World()
    plan = build(world, tasks, arguments)
    within(HANG, lambda: train(plan, epochs, stepwise), run)
    ordered = {name for name, where in plan.schedule.items() if where.globally_ordered}
    count = len(epochs[0])
    expected = [
        (name, period + plan.schedule[name].stage)
        for period in range(-plan.max_stage, count)
        for name in plan.order
        if name in ordered and 0 <= period + plan.schedule[name].stage < count
    ]
    assert [work for work in world.submissions if work[0] in ordered] == expected


@random_runs
@given(runs())
def test_work_on_device_streams_keeps_the_serial_order_of_what_conflicts(
    run: tuple[list[Declared], dict[str, Any], list[list[int]], list[str]],
) -> None:
    tasks, arguments, epochs, stepwise = run
    with fake_device() as device:
        world = World(launch=device.launch)
        plan = build(world, tasks, arguments)
        retired, _, _ = within(HANG, lambda: train(plan, epochs, stepwise, device="cuda"), run)
        for before, after in conflicts(tasks, len(retired)):
            assert before in device.ran_after[after]
        # What was retired is done before anything that the caller's stream is given next.
        assert device.default.before == frozenset(device.ran_after)
