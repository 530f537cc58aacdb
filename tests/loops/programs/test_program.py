from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lightning_pipe.engine import (
    IterContext,
    PipelinePlan,
    PipelineTask,
    PlanError,
    SetupError,
    SWPipeline,
    TaskSchedule,
)
from lightning_pipe.loops.programs.program import TrainingProgram


class Log:
    """A program of five tasks that note themselves, copy and lookup one iteration ahead."""

    def __init__(self, **options: Any) -> None:
        self.calls: list[Any] = []
        self.closed = 0
        tasks = {
            PipelineTask("Copy", self.note("Copy"), reads=("batch",), writes=("batch",)): TaskSchedule(stage=1),
            PipelineTask("Forward", self.forward, reads=("batch", "training_step"), writes=("output",)): TaskSchedule(),
            PipelineTask(
                "Backward", self.backward, reads=("output", "run_backward"), writes=("gradients",)
            ): TaskSchedule(),
            PipelineTask("Step", self.note("Step"), reads=("gradients",), writes=("stepped",)): TaskSchedule(),
            PipelineTask("After", self.note("After"), reads=("stepped",)): TaskSchedule(),
        }
        pipeline = SWPipeline(PipelinePlan(tasks, name="log"))
        self.program = TrainingProgram(
            pipeline,
            transfer="Copy",
            step="Step",
            forward="Forward",
            backward="Backward",
            on_close=self.count_close,
            **options,
        )

    def note(self, name: str) -> Any:
        return lambda ctx: self.calls.append((name, ctx.iter_idx))

    def forward(self, ctx: IterContext) -> None:
        ctx.output = ctx.training_step()

    def backward(self, ctx: IterContext) -> None:
        ctx.run_backward()

    def count_close(self) -> None:
        self.closed += 1

    def train(self, source: Iterator[Any]) -> Any:
        """One batch, as Lightning and the strategy would call."""
        program = self.program
        ctx = program.begin_next_batch(source)
        self.calls.append(("hooks", ctx.iter_idx))
        program.set_training_step(lambda: f"output of {ctx.batch}")
        program.pipeline.run_until(program.forward)
        output = ctx.output
        program.run_backward(lambda: self.calls.append(("backward", ctx.iter_idx)))
        program.begin_step_task()
        self.calls.append(("step", ctx.iter_idx))
        program.end_step_task()
        program.finish_batch()
        return output


@pytest.fixture
def log() -> Iterator[Log]:
    made = Log()
    yield made
    made.program.close()


def test_hooks_come_after_the_transfer_ahead_and_the_step_is_the_callers(log: Log) -> None:
    source = iter("abc")
    assert [log.train(source) for _ in range(3)] == ["output of a", "output of b", "output of c"]
    assert log.calls[:7] == [
        ("Copy", 0),
        ("Copy", 1),
        ("hooks", 0),
        ("backward", 0),
        ("step", 0),
        ("After", 0),
        ("Copy", 2),
    ]
    assert ("Step", 0) not in log.calls
    with pytest.raises(StopIteration):
        log.program.begin_next_batch(source)


def test_an_optimizer_that_calls_its_closure_again_is_refused_by_name_of_the_cause(log: Log) -> None:
    log.program.begin_next_batch(iter("ab"))
    log.program.set_training_step(lambda: "loss")
    log.program.pipeline.run_until(log.program.forward)
    with pytest.raises(SetupError, match=r"closure a second time.*LBFGS.*strategy='pipeline'"):
        log.program.set_training_step(lambda: "loss")


def test_batches_that_are_abandoned_are_counted_and_training_goes_on_with_the_next(log: Log) -> None:
    source = iter("abcd")
    log.train(source)
    log.program.begin_next_batch(source)
    assert log.program.abandon_batches() == 2
    assert log.program.current is None
    assert log.train(source) == "output of d"


def test_closing_twice_closes_once_and_ends_the_pipeline(log: Log) -> None:
    log.train(iter("ab"))
    log.program.close()
    log.program.close()
    assert log.closed == 1
    with pytest.raises(PlanError, match="is closed"):
        log.program.begin_next_batch(iter("ab"))
