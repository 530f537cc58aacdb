"""What ran when: the spans that a pipeline records while its trace is on."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskSpan:
    """One run of one task.

    Args:
        task: name of the task.
        iteration: index of the iteration it ran for.
        thread: name of the thread group it ran in.
        stream: name of its device stream, ``None`` for the current one.
        start: host clock when its function was entered, after all waits for other tasks (seconds, arbitrary origin).
        end: the same when it was left; on a device with streams the device may still be at work.
        start_order: position of the start among all starts and ends of this trace: an order without a clock.
        end_order: position of the end among them.
    """

    task: str
    iteration: int
    thread: str
    stream: str | None
    start: float
    end: float
    start_order: int
    end_order: int


class Trace:
    """Collects spans from any thread."""

    def __init__(self) -> None:
        self.spans: list[TaskSpan] = []
        # next() on a count and append on a list are atomic under the interpreter lock: no lock of our own.
        self._order = itertools.count()

    def now(self) -> tuple[int, float]:
        """Next position in the order, and the host clock in seconds."""
        return next(self._order), time.perf_counter()

    def add(self, task: str, iteration: int, thread: str, stream: str | None, start: tuple[int, float]) -> None:
        """Close the span that began at *start* (a value of :meth:`now`)."""
        end_order, end = self.now()
        self.spans.append(TaskSpan(task, iteration, thread, stream, start[1], end, start[0], end_order))
