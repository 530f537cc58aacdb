"""Error classes of the project: one per kind of mistake, so that users can catch errors by meaning.

Every message shows the value found, the value expected and the fix. The classes are part of the engine because every
other sub-package may import the engine.
"""

from __future__ import annotations


def get_error_text(error: BaseException) -> str:
    """Text of an error; what is wrong with it if the error's class cannot give it."""
    try:
        return str(error)
    except Exception as without_text:  # a worker or another rank waits for this error to be reported
        return f"its text cannot be read: {type(without_text).__name__}"


class PipelineError(Exception):
    """Base class of all errors that this project raises on purpose."""


class PlanError(PipelineError, ValueError):
    """Error for a plan that cannot run: unknown task, cycle, invalid stage, too small a depth, ranks that disagree."""


class SetupError(PipelineError, RuntimeError):
    """Error for a model, optimizer, strategy or environment that cannot be set up as configured."""


class InputError(PipelineError, ValueError):
    """Error for a batch that cannot be trained: unexpected keys, ids out of range, an unmovable type, a NaN loss."""


class TaskError(PipelineError, RuntimeError):
    """Error for a task that raised. The original exception is the cause.

    Args:
        task: name of the task that raised.
        iteration: index of the iteration that the task ran for, counted from 0.
        stage: stage of the task in the plan (iterations ahead of the trained one).
        rank: rank of the process in the world group, 0 without a group.
        error: the original exception.

    Attributes:
        summary: message without the original exception. Callers that raise the original exception add it as a note.
        on_worker: True if the task ran in a worker thread.
    """

    def __init__(self, task: str, iteration: int, stage: int, rank: int, error: BaseException) -> None:
        self.summary = f"task {task!r} of iteration {iteration} (stage {stage}) failed on rank {rank}"
        super().__init__(f"{self.summary} with {type(error).__name__}: {get_error_text(error)}")
        self.task = task
        self.iteration = iteration
        self.stage = stage
        self.rank = rank
        self.on_worker = False
