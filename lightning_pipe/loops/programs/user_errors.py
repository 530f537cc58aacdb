"""What users see of an error in a pipelined loop: their own exception, with a note that says where.

Tested in ``tests/scenarios/faults/test_exceptions.py``.
"""

from __future__ import annotations

import torch.distributed as dist

from lightning_pipe.engine import PipelineError, PipelinePlan, TaskError
from lightning_pipe.engine.plans.schedule import MAIN

__all__ = ["note_lost_rank", "user_error"]


def user_error(error: TaskError, plan: PipelinePlan) -> BaseException:
    """What to raise for a failed task: users' own exceptions keep their type, as in Lightning's loop.

    What the main thread runs are users' hooks and datasets, and users expect to catch what those raise; so does an
    error of this project's own say enough wherever it comes from. The task, its iteration, stage and rank are added
    as a note. Anything else that a worker thread raised stays what it is.
    """
    cause = error.__cause__
    where = plan.schedule.get(error.task)  # none for the data iterator: the main thread's
    on_worker = where is not None and where.thread_group != MAIN
    if cause is None or (on_worker and not isinstance(cause, PipelineError)):
        return error
    cause.add_note(error.where)
    return cause


_LOST = "another rank has ended, or does not answer; its own output says why"


def note_lost_rank(error: BaseException, world_size: int) -> None:
    """Say in a user's words what a process group says in its own."""
    text = str(error)
    of_group = isinstance(error, dist.DistError) or "/gloo/" in text or "pair closure" in text
    if world_size > 1 and of_group and _LOST not in getattr(error, "__notes__", ()):
        error.add_note(_LOST)
