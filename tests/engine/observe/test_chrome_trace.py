"""Timelines as Chrome's trace events, held against the format's rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_pipe.engine.observe.chrome_trace import export_chrome_trace, trace_events
from lightning_pipe.engine.observe.timeline import TASK, Bar, Timeline
from lightning_pipe.engine.plans.dependencies import Dependency
from tests.engine.trace_event_rules import violations


def task(name: str, iteration: int, start: float, end: float, lane: str = "main", rank: int = 0) -> Bar:
    return Bar(rank, lane, name, TASK, start, end, iteration)


def part(kind: str, stage: int, start: float, end: float) -> Bar:
    return Bar(stage, "main", kind, kind, start, end, 0, 2, stage)


def timeline() -> Timeline:
    """Two ranks; rank 1's clock is wrong by 10 µs, so that its forward seems to begin before rank 0's has ended."""
    return Timeline(
        [
            task("copy", 1, 100.0, 100.001, "w"),
            task("step", 0, 100.0005, 100.004),
            part("forward", 0, 100.001, 100.002),
            task("step", 0, 100.0, 100.004, rank=1),
            part("wait_forward", 1, 100.001, 100.00199),
            part("forward", 1, 100.00199, 100.003),
            task("step", 1, 100.004, 100.004),
        ],
        [Dependency("copy", "step"), Dependency("step", "step", 1)],
    )


def events(phase: str, trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_a_timeline_keeps_the_formats_rules() -> None:
    assert violations(json.loads(json.dumps(trace_events(timeline(), {"plan": "p"})))) == []


def test_bars_become_slices_in_microseconds_of_their_ranks_and_lanes() -> None:
    trace = trace_events(timeline(), {"plan": "p"})
    slices = {
        (event["pid"], event["tid"], event["name"], event["args"]["iteration"]): event for event in events("X", trace)
    }
    assert len(slices) == 7
    assert (slices[1, 2, "copy", 1]["ts"], slices[1, 2, "copy", 1]["dur"]) == (0.0, 1000.0)
    forward = slices[2, 3, "forward 2", 0]
    assert (forward["ts"], forward["dur"], forward["cat"]) == (1990.0, 1010.0, "forward")
    assert forward["args"] == {"iteration": 0, "microbatch": 2, "stage": 1, "critical": True}
    assert trace["otherData"] == {"plan": "p"}


def test_dependencies_become_flows_from_the_end_of_one_slice_to_the_beginning_of_the_other() -> None:
    trace = trace_events(timeline(), {})
    starts = {event["id"]: event for event in events("s", trace)}
    found = {(starts[e["id"]]["tid"], starts[e["id"]]["ts"], e["tid"], e["ts"]) for e in events("f", trace)}
    assert found == {(1, 3999.999, 1, 4000.0), (2, 999.999, 1, 4000.0), (1, 1990.0, 3, 1990.0)}


def test_an_arrow_arrives_inside_a_bar_that_seems_to_begin_too_early() -> None:
    trace = trace_events(Timeline([part("forward", 0, 1.0, 2.0), part("forward", 1, 0.5, 1.1)]), {"plan": "p"})
    assert [(event["tid"], event["ts"]) for event in events("s", trace)] == [(1, 500000.0)]
    assert [(event["tid"], event["ts"]) for event in events("f", trace)] == [(2, 500000.0)]
    assert trace["otherData"] == {"plan": "p"}
    assert violations(trace) == []


def test_an_arrow_that_clocks_turn_around_is_left_out_and_counted() -> None:
    trace = trace_events(Timeline([part("forward", 0, 1.0, 2.0), part("forward", 1, 0.5, 0.9)]), {"plan": "p"})
    assert events("s", trace) == events("f", trace) == []
    assert trace["otherData"] == {"plan": "p", "arrows_left_out": 1}
    assert violations(trace) == []


def test_what_overlaps_on_a_stream_is_cut_so_that_it_nests() -> None:
    bars = [
        Bar(0, "stream a", name, "device", start, end) for name, start, end in (("x", 0, 2), ("y", 1, 3), ("z", 2, 4))
    ]
    trace = trace_events(Timeline(bars), {})
    assert violations(trace) == []
    assert [event["dur"] for event in events("X", trace)] == [2e6, 1e6, 2e6]


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"
    export_chrome_trace(timeline(), path, {"plan": "p"})
    assert violations(json.loads(path.read_text())) == []
    with pytest.raises(TypeError):
        export_chrome_trace(timeline(), path, {"plan": object()})
    assert violations(json.loads(path.read_text())) == []
    assert [file.name for file in path.parent.iterdir()] == ["trace.json"]
