"""The rules of Chrome's trace event format, as far as ui.perfetto.dev needs them; nothing of how such files are made.

Source: "Trace Event Format", the Chromium project's document: the sections on the JSON object format, on duration,
complete, instant, metadata and flow events.
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
    "process_labels": ("labels", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}
_PHASES = frozenset("XBEMistf")


def violations(trace: Any) -> list[str]:
    """What is wrong with *trace*, as JSON gives it back; empty where nothing is."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["a trace is an object with the list traceEvents"]
    found = []
    if trace.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        found.append(f"displayTimeUnit {trace['displayTimeUnit']!r}")
    try:
        json.dumps(trace, allow_nan=False)
    except ValueError as error:
        found.append(f"not JSON: {error}")
    events = trace["traceEvents"]
    for event in events:
        found.extend(f"{problem} in {event}" for problem in _of_event(event))
    if found:
        return found
    timed = [event for event in events if event["ph"] != "M"]
    if [event["ts"] for event in timed] != sorted(event["ts"] for event in timed):
        found.append("events are not in the order of their times")
    slices, unbalanced = _slices(timed)
    found.extend(unbalanced)
    for thread, spans in slices.items():
        found.extend(_of_nesting(thread, spans))
    return [*found, *_of_names(events, {(e["pid"], e["tid"]) for e in timed}), *_of_flows(timed, slices)]


def _of_event(event: Any) -> list[str]:
    if not isinstance(event, dict):
        return ["no object"]
    phase, found = event.get("ph"), []
    if phase not in _PHASES:
        return [f"phase {phase!r}"]
    if not isinstance(event.get("name"), str) and phase != "E":
        found.append("no name")
    found.extend(f"{key} is no whole number" for key in ("pid", "tid") if type(event.get(key)) is not int)
    if not isinstance(event.get("args", {}), dict):
        found.append("args is no object")
    if not isinstance(event.get("cat", ""), str):
        found.append("cat is no text")
    if phase == "M":
        key, kind = _METADATA.get(event["name"], (None, object))
        if key is None or not isinstance(event.get("args", {}).get(key), kind):
            found.append("metadata that does not exist, or without its argument")
        return found
    found.extend(_of_number(event, "ts"))
    if phase == "X":
        found.extend(_of_number(event, "dur"))
    elif "dur" in event:
        found.append("dur, which only complete events have")
    if phase == "i" and event.get("s", "t") not in ("g", "p", "t"):
        found.append("scope")
    if phase in "stf" and not isinstance(event.get("id"), (int, str)):
        found.append("a flow without an id")
    if "bp" in event and (phase != "f" or event["bp"] != "e"):
        found.append("binding point")
    return found


def _of_number(event: Event, key: str) -> list[str]:
    value: Any = event.get(key)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return [] if is_number and math.isfinite(value) and value >= 0 else [f"{key} is no number from 0"]


def _slices(events: list[Event]) -> tuple[dict[Thread, list[tuple[float, float]]], list[str]]:
    """Begin and end of each slice, by thread; and what begins without an end, or ends without a beginning."""
    slices: dict[Thread, list[tuple[float, float]]] = defaultdict(list)
    begun: dict[Thread, list[Event]] = defaultdict(list)
    found = []
    for event in events:
        thread = (event["pid"], event["tid"])
        if event["ph"] == "X":
            slices[thread].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "B":
            begun[thread].append(event)
        elif event["ph"] == "E":
            if not begun[thread]:
                found.append(f"an end without a beginning: {event}")
                continue
            beginning = begun[thread].pop()
            if event.get("name", beginning["name"]) != beginning["name"]:
                found.append(f"{event} ends {beginning}")
            slices[thread].append((beginning["ts"], event["ts"]))
    found.extend(f"a beginning without an end: {event}" for left in begun.values() for event in left)
    return slices, found


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
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    found = []
    for number, steps in flows.items():
        if "".join(step["ph"] for step in steps).replace("t", "") != "sf":
            found.append(f"flow {number} is not one start and, later, one end")
        if len({(step["name"], step.get("cat")) for step in steps}) > 1:
            found.append(f"flow {number} changes its name or category")
        for step in steps:
            spans = slices.get((step["pid"], step["tid"]), [])
            if step["ph"] == "f" and "bp" not in step:
                found.append(f"flow {number} ends at the next slice, whatever that is")
            elif not any(begin <= step["ts"] <= end for begin, end in spans):
                found.append(f"flow {number} is bound to no slice at {step['ts']}")
    return found
