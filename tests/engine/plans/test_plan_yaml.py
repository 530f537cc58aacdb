from __future__ import annotations

import pytest

from lightning_pipe.engine import PipelinePlan, PipelineTask, PlanError, State, TaskSchedule

TASKS = [
    PipelineTask("Copy", lambda ctx: None, writes=["x"]),
    PipelineTask("Forward", lambda ctx: None, reads=["x", State("t")]),
    PipelineTask("Backward", lambda ctx: None, writes=[State("t")]),
]


def test_a_stale_plan_comes_back_from_its_yaml() -> None:
    plan = PipelinePlan(
        [(TASKS[0], TaskSchedule(2)), (TASKS[1], TaskSchedule(2)), (TASKS[2], TaskSchedule())],
        stale=[("Backward", "Forward", 1)],
        name="stale: yes",
    )
    again = PipelinePlan.from_yaml(plan.to_yaml(), TASKS)
    assert again.stale == plan.stale
    assert again.description() == plan.description()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: {Copy: {}, Forward: {}, Backward: {}, Copy: {stage: 1}}", "repeats the key 'Copy'; write it once"),
        ("tasks: {Copy: {}, Forward: {}, Backward: {}, Sing: {}}", "unknown task 'Sing'; the tasks are Copy, Forward"),
        ("tasks: {Copy: {}}", "leaves out Forward, Backward"),
        ("tasks: {Copy: {}, Forward: {}, Backward: {}}\ndepth: 3", "unknown key 'depth'; known keys are name, pipel"),
        (
            "tasks: {Copy: {thread: w}, Forward: {}, Backward: {}}",
            "task 'Copy' of the plan has the unknown key 'thread'",
        ),
        ("tasks: {Copy: 3, Forward: {}, Backward: {}}", "task 'Copy' of the plan is 3; expected a mapping"),
        ("tasks: [Copy, Forward, Backward]", r"the plan has the tasks \['Copy', .*; expected a mapping from each task"),
        ("", "the plan is None; expected a mapping of"),
        ("tasks: {Copy: {stage: two}, Forward: {}, Backward: {}}", "has stage 'two'"),
        ("tasks: {Copy: {}, Forward: {}, Backward: {}}\norder: Copy", "order is 'Copy'; expected a list"),
        ("tasks: {Copy: {}, Forward: {}, Backward: {}}\npipeline_depth: deep", "pipeline_depth 'deep'"),
        ("tasks: {Copy: {}, Forward: {}, Backward: {}}\nstale: [[Backward, Forward, 1]]", "into its name"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        PipelinePlan.from_yaml(text, TASKS)
