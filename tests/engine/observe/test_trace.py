"""What a trace keeps of the tasks that it is told of."""

from __future__ import annotations

from typing import Any

from lightning_pipe.engine.observe.trace import TraceRecorder


def test_a_full_trace_keeps_the_latest_spans() -> None:
    trace = TraceRecorder(max_spans=3)
    for iteration in range(5):
        trace.end_span("task", iteration, "main", None, trace.begin_span())
    assert [span.iteration for span in trace.spans()] == [2, 3, 4]


class Counts:
    """A device's clock that says 100, 101, ... and tells the host's time to be ten times that."""

    def __init__(self) -> None:
        self.next = 99

    def record_event(self) -> int:
        self.next += 1
        return self.next

    def to_host_seconds(self, marks: list[int]) -> list[float]:
        return [10.0 * mark for mark in marks]


def test_spans_have_the_times_of_the_device_where_it_has_a_clock() -> None:
    clock: Any = Counts()
    trace = TraceRecorder(device_clock=clock)
    outer = trace.begin_span()
    trace.end_span("inner", 0, "w", None, trace.begin_span())
    trace.end_span("outer", 0, "main", None, outer)
    assert [(span.device_start, span.device_end) for span in trace.spans()] == [(1010.0, 1020.0), (1000.0, 1030.0)]
