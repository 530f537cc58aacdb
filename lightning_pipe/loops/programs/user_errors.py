"""Errors that users see in a pipelined loop: their own exception, with a note about task, iteration and rank."""

from __future__ import annotations

import torch.distributed as dist

from lightning_pipe.engine import PipelineError, TaskError
from lightning_pipe.engine.common.errors import get_error_text


def unwrap_task_error(error: TaskError) -> BaseException:
    """Return the exception to raise for a failed task: users' exceptions keep their type, as in Lightning's loop.

    The main thread runs users' hooks and datasets, and users expect to catch the exceptions of these. This project's
    errors are self-explanatory, in any thread. In both cases the original exception is returned, with task, iteration,
    stage and rank as a note. For other exceptions of worker threads, *error* is returned, and for ``StopIteration``,
    which a loop would take for the end of the data.
    """
    cause = error.__cause__
    hidden = error.on_worker and not isinstance(cause, PipelineError)
    if cause is None or hidden or isinstance(cause, StopIteration):
        return error
    cause.add_note(error.summary)
    return cause


_LOST = "another rank has ended, or does not answer. See the output of that rank for the cause"


def is_process_group_error(error: BaseException | None) -> bool:
    """Return True for an error of a process group: a timeout, or the loss of another rank."""
    text = "" if error is None else get_error_text(error)
    return isinstance(error, dist.DistError) or "/gloo/" in text or "pair closure" in text


def add_lost_rank_note(error: BaseException, world_size: int) -> None:
    """Add a note to errors of a process group that are caused by the loss of another rank."""
    if world_size > 1 and is_process_group_error(error) and _LOST not in getattr(error, "__notes__", ()):
        error.add_note(_LOST)
