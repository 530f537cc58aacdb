from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pipe.engine import PipelinePlan, PipelineTask, PlanError, PlanSpec, State, TaskSchedule
from tests.engine.random_plans import World, build, random_schedules, random_tasks

HERE, AHEAD = TaskSchedule(), TaskSchedule(1, "copies")
SPEC = PlanSpec(
    "stale",
    {"Copy": AHEAD, "Forward": HERE, "Backward": HERE},
    ("Copy", "Forward", "Backward"),
    deps=(("Copy", "Backward"),),
    cross_iter_deps=(("Backward", "Copy", 3), ("Forward", "Copy", 2)),
    stale=(("Backward", "Forward"),),
)
TASKS = [
    PipelineTask("Copy", lambda ctx: None, writes=["x"]),
    PipelineTask("Forward", lambda ctx: None, reads=["x", State("t")]),
    PipelineTask("Backward", lambda ctx: None, writes=[State("t")]),
]


def test_an_edit_leaves_the_spec_as_it_was() -> None:
    before = SPEC.to_yaml()
    SPEC.insert("Log", HERE).move("Copy").without(["Forward"])
    assert SPEC.to_yaml() == before
    with pytest.raises(FrozenInstanceError):
        SPEC.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("place", "order"),
    [
        ({}, ("Copy", "Forward", "Backward", "Log")),
        ({"after": "Copy"}, ("Copy", "Log", "Forward", "Backward")),
        ({"after": "Backward"}, ("Copy", "Forward", "Backward", "Log")),
        ({"before": "Copy"}, ("Log", "Copy", "Forward", "Backward")),
    ],
)
def test_a_task_is_inserted_at_its_place_and_else_at_the_end(place: dict[str, str], order: tuple[str, ...]) -> None:
    added = SPEC.insert("Log", AHEAD, **place)
    assert added.order == order
    assert added.schedule == {**SPEC.schedule, "Log": AHEAD}
    assert (added.deps, added.cross_iter_deps, added.stale) == (SPEC.deps, SPEC.cross_iter_deps, SPEC.stale)


def test_an_order_that_is_to_be_derived_stays_so_when_a_task_is_inserted() -> None:
    assert PlanSpec("plan", {"Copy": HERE}).insert("Log", AHEAD, after="Copy").order == ()


@pytest.mark.parametrize(
    ("after", "order"), [("Backward", "Forward Backward Copy"), ("Forward", "Forward Copy Backward")]
)
def test_a_task_is_moved_after_another_one(after: str, order: str) -> None:
    assert SPEC.move("Copy", after=after).order == tuple(order.split())
    assert SPEC.move("Copy", after=after).move("Copy", after=None).order == ("Forward", "Backward", "Copy")


def test_a_place_beside_a_task_that_the_order_leaves_out_is_refused() -> None:
    for edit in (
        lambda: SPEC.insert("Log", HERE, after="Sing"),
        lambda: SPEC.insert("Log", HERE, before="Sing"),
        lambda: SPEC.move("Sing"),
        lambda: SPEC.move("Copy", after="Sing"),
    ):
        with pytest.raises(PlanError, match="plan 'stale': order must name each task once; missing: Sing"):
            edit()


def test_what_names_a_task_goes_with_it() -> None:
    for rest in (SPEC.without(["Backward", "Sing"]), SPEC.only(["Copy", "Forward", "Sing"])):
        assert rest == PlanSpec(
            "stale", {"Copy": AHEAD, "Forward": HERE}, ("Copy", "Forward"), cross_iter_deps=(("Forward", "Copy", 2),)
        )


def test_tasks_are_given_in_their_own_serial_order() -> None:
    plan = PipelinePlan.from_spec(PlanSpec("plan", {"Backward": HERE, "Forward": HERE, "Copy": AHEAD}), TASKS)
    assert list(plan.tasks) == ["Copy", "Forward", "Backward"]
    assert plan.schedule["Copy"] == AHEAD


def test_tasks_and_a_spec_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanError, match=r"leaves out Backward\. Add `Backward: {}`"):
        PipelinePlan.from_spec(SPEC.without(["Backward"]), TASKS)
    with pytest.raises(PlanError, match="unknown task 'Log'; the tasks are Copy, Forward, Backward"):
        PipelinePlan.from_spec(SPEC.insert("Log", HERE), TASKS)
    with pytest.raises(PlanError, match="deps names the unknown task 'Sing'"):
        PipelinePlan.from_spec(PlanSpec("plan", {"Copy": HERE}, deps=(("Copy", "Sing"),)), TASKS[:1])


@settings(max_examples=60, deadline=None, database=None)
@given(st.data())
def test_a_plan_comes_back_from_its_spec_and_the_spec_from_yaml(data: st.DataObject) -> None:
    tasks = data.draw(random_tasks())
    plan = build(World(), tasks, data.draw(random_schedules(tasks)))
    again = PipelinePlan.from_spec(plan.spec, plan.tasks.values())
    assert again.description() == plan.description()
    assert again.spec == plan.spec == PlanSpec.from_yaml(plan.spec.to_yaml())
