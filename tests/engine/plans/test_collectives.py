"""Plans whose collectives could be submitted in two orders are refused; the others take turns only where needed."""

from __future__ import annotations

import pytest

from lightning_pipe.engine import PipelinePlan, PipelineTask, PlanError, SWPipeline, TaskSchedule
from lightning_pipe.engine.plans.collectives import assign_sequencers
from tests.engine.fake_device import fake_device

MAIN, WORKER = TaskSchedule(), TaskSchedule(thread_group="w")
MAIN_IN_TURN, WORKER_IN_TURN = TaskSchedule(globally_ordered=True), TaskSchedule(0, None, "w", True)


def task(name: str, *groups: str) -> PipelineTask:
    return PipelineTask(name, lambda ctx: None, collectives=groups)


def turns(*scheduled: tuple[PipelineTask, TaskSchedule], has_streams: bool = False) -> dict[str, int]:
    tasks = [one for one, _ in scheduled]
    return assign_sequencers(tasks, {one.name: where for one, where in scheduled}, has_streams=has_streams)


@pytest.mark.parametrize(("first", "second"), [(MAIN, WORKER), (MAIN_IN_TURN, WORKER), (MAIN, WORKER_IN_TURN)])
def test_one_process_group_in_two_threads_without_an_order_is_refused(
    first: TaskSchedule, second: TaskSchedule
) -> None:
    unordered = ", ".join(name for name, where in (("a", first), ("b", second)) if not where.globally_ordered)
    with pytest.raises(
        PlanError, match=rf"a, b submit .* the process group 'tables' from .* main, w.* of {unordered} "
    ):
        PipelinePlan([(task("a", "tables"), first), (task("b", "input", "tables"), second)])


def test_one_process_group_in_two_threads_with_an_order_takes_turns() -> None:
    scheduled = (task("a", "tables"), MAIN_IN_TURN), (task("b", "tables"), WORKER_IN_TURN)
    PipelinePlan(scheduled)
    assert turns(*scheduled) == {"a": 0, "b": 0}


def test_threads_with_process_groups_of_their_own_need_no_turns_on_a_device_without_streams() -> None:
    scheduled = (task("a", "tables"), MAIN_IN_TURN), (task("b", "input"), WORKER_IN_TURN)
    assert turns(*scheduled) == {}
    assert turns(*scheduled, has_streams=True) == {"a": 0, "b": 0}


def test_threads_with_process_groups_of_their_own_need_an_order_on_a_device_with_streams() -> None:
    plan = PipelinePlan([(task("a", "tables"), MAIN), (task("b", "input"), WORKER_IN_TURN)])
    SWPipeline(plan).close()
    with fake_device(), pytest.raises(PlanError, match=r"the process groups tables, input from .* of a to true"):
        SWPipeline(plan, "cuda")


def test_tasks_that_share_process_groups_through_a_third_task_take_turns_together() -> None:
    found = turns(
        (task("a", "x"), MAIN_IN_TURN),
        (task("b", "y"), WORKER_IN_TURN),
        (task("both", "x", "y"), MAIN_IN_TURN),
        (task("apart", "z"), WORKER_IN_TURN),
    )
    assert found == {"a": 0, "b": 0, "both": 0}


def test_an_ordered_task_without_declared_groups_takes_turns_with_all_others() -> None:
    assert turns((task("a", "x"), MAIN_IN_TURN), (task("any"), WORKER_IN_TURN)) == {"a": 0, "any": 0}
