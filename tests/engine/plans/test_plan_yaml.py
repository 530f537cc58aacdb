from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pipe.engine import PipelinePlan, PipelineTask, PlanError, State, TaskSchedule
from tests.engine.random_plans import Declared, World, build, random_schedules, random_tasks

TASKS = [
    PipelineTask("Copy", lambda ctx: None, writes=["x"]),
    PipelineTask("Forward", lambda ctx: None, reads=["x", State("t")]),
    PipelineTask("Backward", lambda ctx: None, writes=[State("t")]),
]


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Declared], dict[str, Any]]:
    tasks = draw(random_tasks())
    return tasks, draw(random_schedules(tasks))


@settings(max_examples=60, deadline=None, database=None)
@given(plans())
def test_a_plan_comes_back_from_its_yaml(drawn: tuple[list[Declared], dict[str, Any]]) -> None:
    plan = build(World(), *drawn)
    again = PipelinePlan.from_yaml(plan.to_yaml(), list(plan.tasks.values()))
    assert again.description() == plan.description()
    assert again.schedule == plan.schedule
    assert again.to_yaml() == plan.to_yaml()


def test_a_stale_plan_comes_back_from_its_yaml() -> None:
    plan = PipelinePlan(
        [(TASKS[0], TaskSchedule(2)), (TASKS[1], TaskSchedule(2)), (TASKS[2], TaskSchedule())],
        stale=[("Backward", "Forward", 1)],
        name="stale: yes",
    )
    again = PipelinePlan.from_yaml(plan.to_yaml(), TASKS)
    assert again.stale == plan.stale
    assert again.description() == plan.description()


def test_the_serial_order_is_that_of_the_tasks_and_not_of_the_file() -> None:
    plan = PipelinePlan.from_yaml("tasks: {Backward: {}, Forward: {}, Copy: {stage: 1}}", TASKS)
    assert list(plan.tasks) == ["Copy", "Forward", "Backward"]
    assert plan.name == "plan"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: {Copy: {}, Forward: {}, Backward: {}, Copy: {stage: 1}}", "the key 'Copy' repeats; write it once"),
        ("name: a\nname: b\ntasks: {}", "the key 'name' repeats"),
        ("tasks: {Copy: {stage: 1, stage: 2}, Forward: {}, Backward: {}}", "the key 'stage' repeats"),
        ("tasks: {Copy: {}, Forward: {}, Backward: {}, Sing: {}}", "unknown task 'Sing'; the tasks are Copy, Forward"),
        ("tasks: {Copy: {}}", "leaves out Forward, Backward"),
        ("tasks: {Copy: {}, Forward: {}, Backward: {}}\ndepth: 3", "unknown key 'depth'; known keys are name, pipel"),
        (
            "tasks: {Copy: {thread: w}, Forward: {}, Backward: {}}",
            "task 'Copy' of the plan has the unknown key 'thread'",
        ),
        ("tasks: {Copy: 3, Forward: {}, Backward: {}}", "task 'Copy' of the plan has 3; write a mapping"),
        ("tasks: [Copy, Forward, Backward]", r"map each task to its schedule; found \['Copy'"),
        ("name: x", "map each task to its schedule; found None"),
        ("", "a plan must be a mapping of .*; found NoneType"),
        ("tasks: {", "not valid YAML"),
        ("tasks: {Copy: &a {stage: 1}, Forward: *a, Backward: {}}", r"found the alias \*a; write the value .*line 1"),
        ("tasks: !!python/object/apply:os.system [ls]", "not valid YAML: could not determine a constructor"),
        ("tasks: " + "[" * 5000, "not valid YAML"),
        (f"# {'a' * 2**18}", "characters; expected at most 262144"),
        ("tasks: {Copy: {stage: two}, Forward: {}, Backward: {}}", "has stage 'two'"),
        ("tasks: {Copy: {}, Forward: {}, Backward: {}}\norder: Copy", "order is 'Copy'; write a list"),
        ("tasks: {Copy: {}, Forward: {}, Backward: {}}\norder: 0", "order is 0; write a list"),
        ("tasks: {Copy: {}, Forward: {}, Backward: {}}\ndeps: 0", "deps is 0; write a list"),
        ("tasks: {Copy: 0, Forward: {}, Backward: {}}", "task 'Copy' of the plan has 0; write a mapping"),
        ("tasks: {Copy: {}, Forward: {}, Backward: {}}\npipeline_depth: deep", "pipeline_depth 'deep'"),
        ("tasks: {Copy: {}, Forward: {}, Backward: {}}\nstale: [[Backward, Forward, 1]]", "into its name"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PipelinePlan.from_yaml(text, TASKS)
