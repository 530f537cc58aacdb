"""Where one task runs.

Tested in ``tests/engine/plans/test_plan.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

MAIN = "main"


@dataclass(frozen=True)
class TaskSchedule:
    """Where one task runs.

    Args:
        stage: how many iterations ahead of the one being trained the task runs.
        stream: name of a device stream, ``None`` for the current one. Without a device that has streams, the name only
            labels the task.
        thread_group: ``"main"`` is the calling thread; every other name is one worker thread.
        globally_ordered: the task submits collectives whose order must be the same on every rank although other thread
            groups submit some too: its turn comes in the plan's order.
    """

    stage: int = 0
    stream: str | None = None
    thread_group: str = MAIN
    globally_ordered: bool = False
