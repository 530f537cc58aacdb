from __future__ import annotations

from typing import Any

from lightning_pipe.loops.programs.default_program import default_program
from tests.loops.models import trainer


def test_the_next_batch_is_moved_while_the_caller_trains_this_one() -> None:
    moved: list[Any] = []

    def transfer(batch: Any) -> Any:
        moved.append(batch)
        return batch.upper()

    program = default_program(trainer(), transfer)
    source = iter("abc")
    assert program.begin_next_batch(source).batch == "A"
    assert moved == ["a", "b"]
    assert program.trains_in_one_task
    program.begin_step_task()
    program.end_step_task()
    program.finish_batch()
    assert program.begin_next_batch(source).batch == "B"
    assert moved == ["a", "b", "c"]
    program.close()


def test_its_plan_says_what_it_does() -> None:
    program = default_program(trainer(), lambda batch: batch)
    plan = program.pipeline.plan
    assert plan.name == "copy_ahead"
    assert plan.pipeline_depth == 2
    assert list(plan.tasks) == ["H2D", "TrainBatch"]
    assert (plan.schedule["H2D"].stage, plan.schedule["TrainBatch"].stage) == (1, 0)
    program.close()
