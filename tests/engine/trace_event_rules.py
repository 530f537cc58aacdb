"""The rules of Chrome's trace event format, as far as ui.perfetto.dev needs them; nothing of how such files are made.

Source: "Trace Event Format", the Chromium project's document: the sections on the JSON object format, on complete,
metadata and flow events, which are those that the package writes.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

Event = dict[str, Any]
Thread = tuple[int, int]

_METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def violations(trace: Any) -> list[str]:
    """What is wrong with *trace*, as JSON gives it back; empty where nothing is."""
    json.dumps(trace, allow_nan=False)
    events = trace["traceEvents"]
    found = [f"{problem} in {event}" for event in events for problem in _of_event(event)]
    if found:
        return found
    timed = [event for event in events if event["ph"] != "M"]
    if [event["ts"] for event in timed] != sorted(event["ts"] for event in timed):
        found.append("events are not in the order of their times")
    slices: dict[Thread, list[tuple[float, float]]] = defaultdict(list)
    for event in timed:
        if event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for thread, spans in slices.items():
        found.extend(_of_nesting(thread, spans))
    return [*found, *_of_names(events, {(e["pid"], e["tid"]) for e in timed}), *_of_flows(timed, slices)]


def _of_event(event: Event) -> list[str]:
    phase = event["ph"]
    if phase not in "XMsf":
        return [f"phase {phase!r}"]
    found = [f"{key} is no whole number" for key in ("pid", "tid") if type(event.get(key)) is not int]
    if phase == "M":
        key, kind = _METADATA.get(event["name"], (None, object))
        if key is None or not isinstance(event["args"].get(key), kind):
            found.append("metadata that does not exist, or without its argument")
        return found
    for key in ("ts", "dur") if phase == "X" else ("ts",):
        value: Any = event.get(key)
        if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
            found.append(f"{key} is no number from 0")
    if phase in "sf" and not isinstance(event.get("id"), int | str):
        found.append("a flow without an id")
    if phase == "f" and event.get("bp") != "e":
        found.append("a flow that ends at the next slice, whatever that is")
    return found


def _of_nesting(thread: Thread, slices: list[tuple[float, float]]) -> list[str]:
    found = []
    enclosing: list[float] = []
    for begin, end in sorted(slices, key=lambda span: (span[0], -span[1])):
        while enclosing and enclosing[-1] <= begin + 1e-6:
            enclosing.pop()
        if enclosing and end > enclosing[-1] + 1e-6:
            found.append(f"slices of thread {thread} overlap and do not nest: at {begin}")
        enclosing.append(end)
    return found


def _of_names(events: list[Event], used: set[Thread]) -> list[str]:
    threads = [(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"]
    processes = [e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    found = [f"thread {thread} has {threads.count(thread)} names" for thread in used if threads.count(thread) != 1]
    found += [f"process {pid} has {processes.count(pid)} names" for pid, _ in used if processes.count(pid) != 1]
    return found + [f"{thread} is named and does nothing" for thread in threads if thread not in used]


def _of_flows(events: list[Event], slices: dict[Thread, list[tuple[float, float]]]) -> list[str]:
    flows: dict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            flows[event["id"]].append(event)
    found = []
    for number, steps in flows.items():
        if [step["ph"] for step in steps] != ["s", "f"] or len({(step["name"], step["cat"]) for step in steps}) > 1:
            found.append(f"flow {number} is not one start and, later, one end of the same name")
        for step in steps:
            spans = slices.get((step["pid"], step["tid"]), [])
            if not any(begin <= step["ts"] <= end for begin, end in spans):
                found.append(f"flow {number} is bound to no slice at {step['ts']}")
    return found
