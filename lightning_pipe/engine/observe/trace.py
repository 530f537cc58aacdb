"""Recorded time spans of task runs, collected while the trace of a pipeline is on."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightning_pipe.engine.observe.device_clock import DeviceClock

# State that :meth:`Trace.begin_span` returns for :meth:`Trace.end_span`: position in the order, host clock, event in
# the stream.
Begun = tuple[int, float, Any]


@dataclass(frozen=True)
class TaskSpan:
    """Time span of one run of a task.

    Args:
        task: name of the task.
        iteration: index of the iteration that the task ran for.
        thread: name of the thread group that ran the task.
        stream: name of the device stream; ``None`` for the current stream.
        start: host time when the function was entered, after all waits for other tasks (seconds, arbitrary origin).
        end: host time when the function returned; the device may still be executing its kernels.
        start_order: position of the start among all starts and ends of the trace, independent of the clock.
        end_order: position of the end among all starts and ends of the trace.
        device_start: time when the stream reached the task's work, on the same clock; ``None`` without device streams.
        device_end: time when the stream finished the task's work, on the same clock; ``None`` without device streams.
        submitted: host time when the main thread submitted the task to its worker; ``None`` on the main thread.
    """

    task: str
    iteration: int
    thread: str
    stream: str | None
    start: float
    end: float
    start_order: int
    end_order: int
    device_start: float | None = None
    device_end: float | None = None
    submitted: float | None = None


def median_task_seconds(spans: Iterable[TaskSpan]) -> dict[str, float]:
    """Median time of each task in its thread, in seconds."""
    times: dict[str, list[float]] = {}
    for span in spans:
        times.setdefault(span.task, []).append(span.end - span.start)
    return {task: statistics.median(seconds) for task, seconds in times.items()}


class TraceRecorder:
    """Collects spans from all threads."""

    def __init__(self, max_spans: int | None = None, device_clock: DeviceClock | None = None) -> None:
        # No lock: next() on a count and append on a deque are atomic under the interpreter lock.
        self._order = itertools.count()
        self._records: deque[tuple[str, int, str, str | None, float | None, int, float, Any, int, float, Any]] = deque(
            maxlen=max_spans
        )
        self._device_clock = device_clock

    def begin_span(self) -> Begun:
        """Begin a span. Called with the task's stream as the current one."""
        mark = self._device_clock.record_event() if self._device_clock else None
        return next(self._order), time.perf_counter(), mark

    def end_span(
        self,
        task: str,
        iteration: int,
        thread: str,
        stream: str | None,
        begun: Begun,
        submitted: float | None = None,
    ) -> None:
        """End the span of *begun*, in the same stream. For the other arguments see :class:`TaskSpan`."""
        end = time.perf_counter()
        mark = self._device_clock.record_event() if self._device_clock else None
        self._records.append((task, iteration, thread, stream, submitted, *begun, next(self._order), end, mark))

    def spans(self) -> list[TaskSpan]:
        """Spans ended so far, in the order of their ends. Waits for the device."""
        records = list(self._records.copy())  # a worker may still append to the original
        times: list[tuple[float | None, float | None]] = [(None, None)] * len(records)
        if self._device_clock:
            resolved = self._device_clock.to_host_seconds(
                [mark for record in records for mark in (record[7], record[10])]
            )
            times = list(zip(resolved[::2], resolved[1::2], strict=True))
        return [
            TaskSpan(task, iteration, thread, stream, start, end, start_order, end_order, *device, submitted)
            for (task, iteration, thread, stream, submitted, start_order, start, _, end_order, end, _), device in zip(
                records, times, strict=True
            )
        ]
