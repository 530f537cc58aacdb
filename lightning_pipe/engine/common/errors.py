"""The project's own error classes: few, so that a user can catch by meaning.

Every message says the value found, the value needed and the fix. They live in the engine because the engine is
the one room that every other room may import.
"""

from __future__ import annotations


class PipelineError(Exception):
    """Base of every error that this project raises on purpose."""


class PlanError(PipelineError, ValueError):
    """A plan that cannot be run: unknown task, cycle, impossible stage, too small a depth, ranks that disagree."""


class SetupError(PipelineError, RuntimeError):
    """A model, optimiser, strategy or environment that cannot be set up as asked."""


class InputError(PipelineError, ValueError):
    """A batch that cannot be trained: other keys, ids out of range, a type that cannot be moved, a NaN loss."""


class TaskError(PipelineError, RuntimeError):
    """A task raised; the original exception is the cause.

    Args:
        task: name of the task that raised.
        iteration: index of the iteration it ran for, counted from 0.
        stage: the stage the plan gives the task (iterations ahead of the one being trained).
        rank: rank of the process in the world group, 0 where there is none.
        error: the original exception.

    Attributes:
        where: the message without what went wrong: a note for the original exception, where that is what is raised.
    """

    def __init__(self, task: str, iteration: int, stage: int, rank: int, error: BaseException) -> None:
        self.where = f"task {task!r} of iteration {iteration} (stage {stage}) failed on rank {rank}"
        super().__init__(f"{self.where} with {type(error).__name__}: {error}")
        self.task = task
        self.iteration = iteration
        self.stage = stage
        self.rank = rank
