from __future__ import annotations

from lightning_pipe.engine.trace import Trace


def test_spans_are_ordered_without_a_clock() -> None:
    trace = Trace()
    outer = trace.now()
    inner = trace.now()
    trace.add("inner", 1, "main", None, inner)
    trace.add("outer", 0, "w", "copy", outer)
    first, second = trace.spans
    assert [span.task for span in trace.spans] == ["inner", "outer"]
    assert second.start_order < first.start_order < first.end_order < second.end_order
    assert second.start <= first.start <= first.end <= second.end
    assert (second.iteration, second.thread, second.stream) == (0, "w", "copy")
