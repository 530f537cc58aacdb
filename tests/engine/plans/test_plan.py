from __future__ import annotations

from typing import Any

import pytest

from lightning_pipe.engine import Dependency, PipelinePlan, PipelineTask, PlanError, State, TaskSchedule

TABLES = State("tables")


def task(name: str, reads: list[str] | None = None, writes: list[str] | None = None) -> PipelineTask:
    return PipelineTask(name, lambda ctx: None, reads=reads or [], writes=writes or [])


COPY = task("Copy", ["batch"], ["batch"])
FORWARD = task("Forward", ["batch", TABLES], ["loss"])
BACKWARD = task("Backward", ["loss"], [TABLES])


def plan(stages: tuple[int, int, int] = (1, 0, 0), **arguments: Any) -> PipelinePlan:
    tasks = (COPY, FORWARD, BACKWARD)
    return PipelinePlan({t: TaskSchedule(s) for t, s in zip(tasks, stages, strict=True)}, **arguments)


def test_dependencies_follow_from_reads_and_writes() -> None:
    assert set(plan().dependencies) == {
        Dependency("Copy", "Forward"),
        Dependency("Forward", "Backward"),
        Dependency("Backward", "Forward", 1),
    }


def test_a_plan_may_add_dependencies() -> None:
    extended = plan(deps=[("Copy", "Backward")], cross_iter_deps=[(BACKWARD, COPY), ["Backward", "Copy", 3]])
    added = set(extended.dependencies) - set(plan().dependencies)
    assert added == {
        Dependency("Copy", "Backward"),
        Dependency("Backward", "Copy", 1),
        Dependency("Backward", "Copy", 3),
    }


def test_the_depth_is_what_the_stages_need_unless_it_is_given() -> None:
    assert plan((2, 0, 0)).pipeline_depth == 3
    assert plan((2, 0, 0), pipeline_depth=5).pipeline_depth == 5


def test_the_order_is_derived_unless_it_is_given() -> None:
    assert plan().order == ("Copy", "Forward", "Backward")
    assert plan(order=["Forward", COPY, "Backward"]).order == ("Forward", "Copy", "Backward")


def test_groups_and_streams_are_listed_in_program_order_with_main_first() -> None:
    built = PipelinePlan(
        [(COPY, TaskSchedule(0, "b", "w")), (FORWARD, TaskSchedule(0, "a")), (BACKWARD, TaskSchedule(0, "b", "v"))]
    )
    assert built.thread_group_names == ("main", "w", "v")
    assert built.streams == ("b", "a")


def test_a_plan_without_tasks_is_refused() -> None:
    with pytest.raises(PlanError, match="has no tasks"):
        PipelinePlan({})


def test_a_repeated_task_is_refused() -> None:
    with pytest.raises(PlanError, match="task 'Copy' is scheduled twice"):
        PipelinePlan([(COPY, TaskSchedule()), (COPY, TaskSchedule(1))])


@pytest.mark.parametrize(
    "arguments",
    [
        {"deps": [("Copy", "Sing")]},
        {"cross_iter_deps": [("Sing", "Copy")]},
        {"stale": [("Sing", "Copy")], "name": "stale"},
        {"order": ["Copy", "Sing", "Backward"]},
    ],
)
def test_an_unknown_task_is_named_with_those_there_are(arguments: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="unknown task 'Sing'; its tasks are Copy, Forward, Backward"):
        plan(**arguments)


def test_a_cycle_is_refused_and_shown() -> None:
    with pytest.raises(PlanError, match=r"cycle, .* -> "):
        plan(deps=[("Backward", "Copy")])


def test_a_required_dependency_on_a_task_of_a_lower_stage_is_refused_with_the_ways_out() -> None:
    with pytest.raises(PlanError, match=r"drops a required dependency: Forward after Copy.*to 0 or less.*, or declare"):
        plan((0, 1, 0))


def test_an_added_dependency_on_a_task_of_a_lower_stage_is_refused() -> None:
    with pytest.raises(PlanError, match=r"required dependency: Copy after Backward of 1 iteration.*to 1 or more"):
        plan((2, 0, 0), cross_iter_deps=[("Backward", "Copy")])


def test_a_dropped_dependency_across_iterations_must_be_declared_stale() -> None:
    with pytest.raises(PlanError, match=r"required dependency: Forward after Backward of 1 iteration"):
        plan((2, 2, 0))
    with pytest.raises(PlanError, match=r"no common order.*Forward before Backward"):
        plan((1, 1, 0), order=["Copy", "Forward", "Backward"])


def test_a_declared_stale_dependency_is_abandoned() -> None:
    stale = plan((1, 1, 0), order=["Copy", "Forward", "Backward"], stale=[("Backward", "Forward")], name="semi_sync")
    assert Dependency("Backward", "Forward", 1) not in stale.dependencies


def test_staleness_is_bounded_by_what_is_declared() -> None:
    assert Dependency("Backward", "Forward", 2) in plan(stale=[("Backward", "Forward")], name="stale").dependencies
    with pytest.raises(PlanError, match="required dependency: Forward after Backward of 2 iteration"):
        plan((3, 3, 0), stale=[("Backward", "Forward")], name="stale_1")
    deeper = plan((3, 3, 0), stale=[("Backward", "Forward", 1), ("Backward", "Forward", 2)], name="stale_2")
    assert Dependency("Backward", "Forward", 3) in deeper.dependencies


def test_a_plan_that_gives_up_exactness_must_say_so_in_its_name() -> None:
    with pytest.raises(PlanError, match="put 'stale' or 'semi_sync' into its name"):
        plan(stale=[("Backward", "Forward", 1)], name="fast")


@pytest.mark.parametrize("entry", [("Copy", "Backward"), ("Backward", "Forward", 2)])
def test_giving_up_what_nothing_requires_is_refused(entry: tuple[Any, ...]) -> None:
    with pytest.raises(PlanError, match=r"which no read or write requires.*dependencies are: Forward after Copy"):
        plan(stale=[entry], name="stale")


def test_a_context_field_cannot_be_abandoned() -> None:
    with pytest.raises(PlanError, match="only dependencies on State can be stale"):
        plan(stale=[("Copy", "Forward")], name="stale")


def test_too_small_a_depth_is_refused_with_the_one_needed() -> None:
    with pytest.raises(PlanError, match="pipeline_depth 2, but its stages 0 to 2 need 3"):
        plan((2, 0, 0), pipeline_depth=2)


@pytest.mark.parametrize("stage", [-1, 1.0, True, 1001])
def test_a_stage_that_no_memory_holds_or_is_no_number_is_refused(stage: Any) -> None:
    with pytest.raises(PlanError, match="expected a whole number from 0 to 1000"):
        plan((stage, 0, 0))


@pytest.mark.parametrize("depth", ["three", 1002, 10**400])
def test_a_depth_that_is_no_number_of_batches_is_refused(depth: Any) -> None:
    with pytest.raises(PlanError, match="number of batches in flight"):
        plan(pipeline_depth=depth)


@pytest.mark.parametrize("name", ["\x1b[31m", "a\nb", "\u202egnorw", "a\x85", "\x00"])
def test_names_that_a_terminal_would_obey_are_refused_and_printed_with_escapes(name: str) -> None:
    for make in (
        lambda: plan(name=name),
        lambda: PipelinePlan([(task(name), TaskSchedule())]),
        lambda: PipelinePlan([(COPY, TaskSchedule(stream=name))]),
        lambda: PipelinePlan([(COPY, TaskSchedule(thread_group=name))]),
    ):
        with pytest.raises(PlanError, match="expected text without control characters") as refused:
            make()
        assert str(refused.value).isprintable()


@pytest.mark.parametrize("order", [["Copy", "Forward"], ["Copy", "Forward", "Backward", "Copy"]])
def test_an_order_must_name_each_task_once(order: list[str]) -> None:
    with pytest.raises(PlanError, match="each task once"):
        plan(order=order)


@pytest.mark.parametrize(
    "schedule",
    [
        TaskSchedule(stream=1),  # type: ignore[arg-type]
        TaskSchedule(thread_group=""),
        TaskSchedule(globally_ordered="yes"),  # type: ignore[arg-type]
    ],
)
def test_a_schedule_of_the_wrong_type_is_refused_with_the_task(schedule: TaskSchedule) -> None:
    with pytest.raises(PlanError, match="task 'Copy' has"):
        PipelinePlan({COPY: schedule})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"deps": ["Copy"]}, r"deps has the entry 'Copy'; expected \(upstream, downstream\)"),
        ({"deps": [("Copy", "Backward", 1)]}, r"deps has the entry"),
        ({"deps": "Copy"}, r"deps is 'Copy'; expected a list"),
        ({"order": 3}, r"order is 3; expected a list"),
        ({"stale": {"Copy": "Forward"}}, r"stale is .*; expected a list"),
        ({"cross_iter_deps": [("Copy", "Backward", 0)]}, r"with a distance from 1 to 1000"),
        ({"cross_iter_deps": [("Copy", "Backward", 1001)]}, r"with a distance from 1 to 1000"),
        ({"deps": [(["Copy"], "Backward")]}, r"the task \['Copy'\]; expected the name of a task"),
    ],
)
def test_an_entry_of_the_wrong_shape_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(**arguments)
