"""What the calling thread's time goes to, added up: to watch a pipeline all the time, for which a trace is too long."""

from __future__ import annotations

import time


class Meter:
    """Seconds of the calling thread since the meter was made. Some 0.2 µs a task.

    Attributes:
        fetching: in the data iterator.
        waiting: for workers, until what a task of this thread depends on, or all of an iteration, was done.
        tasks: by name, in the tasks that this thread ran.
    """

    __slots__ = ("fetching", "tasks", "waiting")

    def __init__(self) -> None:
        self.fetching = 0.0
        self.waiting = 0.0
        self.tasks: dict[str, float] = {}

    def ran(self, task: str, begun: float) -> None:
        """Count a run that began at *begun*, by ``time.perf_counter``, and ends now."""
        self.tasks[task] = self.tasks.get(task, 0.0) + time.perf_counter() - begun

    def waited(self, begun: float) -> None:
        """Count a wait, likewise."""
        self.waiting += time.perf_counter() - begun

    def fetched(self, begun: float) -> None:
        """Count a call of the data iterator, likewise."""
        self.fetching += time.perf_counter() - begun
