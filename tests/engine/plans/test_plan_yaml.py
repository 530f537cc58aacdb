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
        ("name: a\nname: b\ntasks: {}", "repeats the key 'name'"),
        ("tasks: {Copy: {stage: 1, stage: 2}, Forward: {}, Backward: {}}", "repeats the key 'stage'"),
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
        ("tasks: {Copy: &a {stage: 1}, Forward: *a, Backward: {}}", r"a reference .*write the value out"),
        ("tasks: !!python/object/apply:os.system [ls]", "not valid YAML: could not determine a constructor"),
        ("tasks: " + "[" * 5000, "not valid YAML"),
        (f"# {'a' * 2**18}", "characters; expected at most 131072"),
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
