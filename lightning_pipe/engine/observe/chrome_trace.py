"""Export of a timeline in Chrome's trace event format (JSON), for ui.perfetto.dev and chrome://tracing.

Source: "Trace Event Format", the Chromium project's document. A rank becomes a process and a lane a thread. Bars become
complete events ("X"), which must be nested or disjoint within a thread. An arrow becomes a flow ("s" to "f"), which
must start and end while the bars that it connects are open. If the clocks of two ranks place all of the target before
the source, the arrow is left out and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_pipe.engine.common.atomic_file import atomic_write
from lightning_pipe.engine.observe.timeline import TASK, Bar, Timeline

_TICK = 1e-3  # microseconds; times are written with three decimals


def export_chrome_trace(timeline: Timeline, path: Path, notes: Mapping[str, Any]) -> None:
    """Write *timeline* to *path* atomically."""
    with atomic_write(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        json.dump(trace_events(timeline, notes), file, separators=(",", ":"))


def trace_events(timeline: Timeline, notes: Mapping[str, Any]) -> dict[str, Any]:
    """Convert *timeline* to the object of the trace format: names first, then all events by time, from 0."""
    # Thread and process numbers start at 1, because process 0 and thread 0 denote idle ones of an operating system.
    threads = {lane: index for index, lane in enumerate(timeline.lanes, 1)}
    origin = min((bar.start for bar in timeline.bars), default=0.0)
    times = _compute_bar_times(timeline, origin)
    events = [
        _make_bar_event(bar, threads[bar.rank, bar.lane], times[position], position in timeline.critical_path)
        for position, bar in enumerate(timeline.bars)
    ]
    flows = list(_make_flow_events(timeline, threads, times))
    left_out = len(timeline.arrows) - len(flows) // 2
    events.extend(flows)
    # At equal times, enclosing slices precede nested ones, and slices precede the flows that refer to them.
    events.sort(key=lambda event: (event["ts"], event["ph"] != "X", -event.get("dur", 0.0)))
    return {
        "traceEvents": [*_make_thread_name_events(timeline, threads), *events],
        "displayTimeUnit": "ms",
        "otherData": {**notes, "arrows_left_out": left_out} if left_out else dict(notes),
    }


def _make_thread_name_events(timeline: Timeline, threads: Mapping[tuple[int, str], int]) -> Iterator[dict[str, Any]]:
    for rank in sorted({rank for rank, _ in threads}):
        yield _make_metadata_event("process_name", rank, {"name": f"rank {rank}"})
        yield _make_metadata_event("process_sort_index", rank, {"sort_index": rank})
    for (rank, lane), thread in threads.items():
        yield _make_metadata_event("thread_name", rank, {"name": lane}, thread)
        yield _make_metadata_event("thread_sort_index", rank, {"sort_index": thread}, thread)


def _make_metadata_event(name: str, rank: int, args: dict[str, Any], thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank + 1, "tid": thread, "args": args}


def _compute_bar_times(timeline: Timeline, origin: float) -> list[tuple[float, float]]:
    """Start and end of each bar in microseconds, clipped so that bars of a stream that two threads use are nested."""
    times: list[tuple[float, float]] = []
    enclosing: list[tuple[float, tuple[int, str]]] = []
    for bar in timeline.bars:
        start, end = round((bar.start - origin) * 1e6, 3), round((bar.end - origin) * 1e6, 3)
        lane = (bar.rank, bar.lane)
        while enclosing and (enclosing[-1][1] != lane or enclosing[-1][0] <= start):
            enclosing.pop()
        if enclosing:
            end = min(end, enclosing[-1][0])
        end = max(start, end)
        times.append((start, end))
        enclosing.append((end, lane))
    return times


def _make_bar_event(bar: Bar, thread: int, time: tuple[float, float], critical: bool) -> dict[str, Any]:
    indices = {"iteration": bar.iteration, "microbatch": bar.microbatch, "stage": bar.stage}
    name = bar.name if bar.microbatch is None else f"{bar.name} {bar.microbatch}"
    return {
        "ph": "X",
        "name": name,
        "cat": bar.kind,
        "pid": bar.rank + 1,
        "tid": thread,
        "ts": time[0],
        "dur": round(time[1] - time[0], 3),
        "args": {key: value for key, value in indices.items() if value is not None} | {"critical": critical},
    }


def _make_flow_events(
    timeline: Timeline, threads: Mapping[tuple[int, str], int], times: list[tuple[float, float]]
) -> Iterator[dict[str, Any]]:
    for number, (source, target) in enumerate(timeline.arrows):
        (begin, end), (target_begin, target_end) = times[source], times[target]
        # A flow must start inside its source bar, and arrive later inside its target bar, even if clock errors suggest
        # that the target began before the source.
        departure = round(max(begin, min(end - _TICK, target_begin)), 3)
        arrival = max(target_begin, departure)
        if arrival > max(target_begin, target_end - _TICK):
            continue
        source_bar, target_bar = timeline.bars[source], timeline.bars[target]
        kind = {"name": "plan" if source_bar.kind == TASK else source_bar.kind, "cat": "dependency", "id": number}
        yield {
            "ph": "s",
            **kind,
            "pid": source_bar.rank + 1,
            "tid": threads[source_bar.rank, source_bar.lane],
            "ts": departure,
        }
        yield {
            "ph": "f",
            "bp": "e",
            **kind,
            "pid": target_bar.rank + 1,
            "tid": threads[target_bar.rank, target_bar.lane],
            "ts": arrival,
        }
