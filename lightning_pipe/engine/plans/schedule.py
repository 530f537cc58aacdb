"""Schedule of one task: its stage, stream and thread group."""

from __future__ import annotations

from dataclasses import dataclass

MAIN = "main"


@dataclass(frozen=True)
class TaskSchedule:
    """Stage, stream and thread group of one task.

    Args:
        stage: number of iterations by which the task runs ahead of the trained one (default 0).
        stream: name of a device stream (default ``None``, the current stream). On devices without streams the name only
            labels the task.
        thread_group: name of the worker thread that runs the task (default ``"main"``, the calling thread).
        globally_ordered: submit the task's collectives in the plan's order on every rank (default False). Required if
            tasks in several thread groups submit collectives to one process group or, on a device with streams, to any
            process groups. A task then waits for its turn where other threads may submit before it.
    """

    stage: int = 0
    stream: str | None = None
    thread_group: str = MAIN
    globally_ordered: bool = False
