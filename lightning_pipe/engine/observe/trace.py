"""What ran when: the spans that a pipeline records while its trace is on."""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lightning_pipe.engine.observe.device_clock import DeviceClock

# What :meth:`Trace.begin` hands to :meth:`Trace.end`: place in the order, host clock, mark in the stream.
Begun = tuple[int, float, Any]


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
        device_start: when its stream came to its work, by the same clock; ``None`` on a device without streams.
        device_end: the same when the stream had done it.
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


def task_seconds(spans: Iterable[TaskSpan]) -> dict[str, float]:
    """By task, the median of the seconds that it took in its thread."""
    times: dict[str, list[float]] = {}
    for span in spans:
        times.setdefault(span.task, []).append(span.end - span.start)
    return {task: statistics.median(seconds) for task, seconds in times.items()}


class Trace:
    """Collects what tasks note, from any thread.

    Args:
        keep: the number of spans to keep, the latest; ``None`` for all.
        device_clock: for spans on a device with streams.
    """

    def __init__(self, keep: int | None = None, device_clock: DeviceClock | None = None) -> None:
        # next() on a count and append on a deque are atomic under the interpreter lock: no lock of our own.
        self._order = itertools.count()
        self._records: deque[tuple[str, int, str, str | None, int, float, Any, int, float, Any]] = deque(maxlen=keep)
        self._device_clock = device_clock

    def begin(self) -> Begun:
        """Begin a span, in the stream that the task runs on."""
        mark = self._device_clock.now() if self._device_clock else None
        return next(self._order), time.perf_counter(), mark

    def end(self, task: str, iteration: int, thread: str, stream: str | None, begun: Begun) -> None:
        """End the span that *begun* began, in the same stream. The other arguments are :class:`TaskSpan`'s."""
        end = time.perf_counter()
        mark = self._device_clock.now() if self._device_clock else None
        self._records.append((task, iteration, thread, stream, *begun, next(self._order), end, mark))

    def spans(self) -> list[TaskSpan]:
        """What has ended so far, in that order; waits for the device."""
        records = list(self._records.copy())  # a worker may still append to the original
        times: list[tuple[float | None, float | None]] = [(None, None)] * len(records)
        if self._device_clock:
            resolved = self._device_clock.resolve([mark for record in records for mark in (record[6], record[9])])
            times = list(zip(resolved[::2], resolved[1::2], strict=True))
        return [
            TaskSpan(task, iteration, thread, stream, start, end, start_order, end_order, *device)
            for (task, iteration, thread, stream, start_order, start, _, end_order, end, _), device in zip(
                records, times, strict=True
            )
        ]
