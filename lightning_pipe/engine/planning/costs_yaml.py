"""Costs of tasks as YAML::

    between_ms: 0.2                 # time of the main thread in each iteration outside tasks
    cores: 2                        # cores for the tasks of one rank
    device_streams: false           # true if a device with streams does the work
    network: {latency: 30us, bandwidth: 1GB/s}
    tasks:
      Copy: {ms: 0.4, resource: copy}
      Exchange: {ms: 0.1, all_to_all: 2MB, waited_by: Train}
      Train: {ms: 5.0}

Only *tasks* is required. ``docs/simulation.md`` describes every key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from lightning_pipe.engine.common.errors import PlanError, SetupError
from lightning_pipe.engine.common.options import check_choice
from lightning_pipe.engine.common.quantities import parse_bandwidth, parse_duration, parse_size
from lightning_pipe.engine.common.safe_text import short_repr
from lightning_pipe.engine.common.strict_yaml import check_mapping_keys, load_mapping
from lightning_pipe.engine.planning.costs import MAX_TASK_SECONDS, TaskCost
from lightning_pipe.engine.planning.network import Collective, CollectiveKind

_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
_KEYS = ("between_ms", "cores", "device_streams", "network", "tasks")
_TASK_KEYS = ("ms", "resource", "launch_ms", *_KINDS, "background_ms", "background_resource", "waited_by")
_NETWORK_KEYS = ("latency", "bandwidth")
_MOST = 1e3 * MAX_TASK_SECONDS  # milliseconds
_EXAMPLE = "the example in docs/simulation.md"


@dataclass(frozen=True)
class CostsSpec:
    """Contents of a costs file."""

    tasks: Mapping[str, TaskCost] = field(default_factory=dict)
    between_periods: float = 0.0  # seconds
    cores: float | None = None
    device_streams: bool = False
    latency: float | None = None  # seconds
    bandwidth: float | None = None  # bytes per second

    @property
    def has_messages(self) -> bool:
        """True if a task submits a collective, so that the costs depend on the number of ranks."""
        return any(isinstance(cost.background, Collective) for cost in self.tasks.values())


def parse_costs_yaml(text: str) -> CostsSpec:
    """Parse costs from YAML *text* in the format of this module's docstring."""
    content = load_mapping(text, "file of costs", _KEYS, compare=_EXAMPLE)
    tasks = content.get("tasks")
    if not isinstance(tasks, dict) or not tasks:
        raise PlanError(
            f"'tasks' of the costs must be a mapping from tasks to costs, got {short_repr(tasks)}. See {_EXAMPLE}."
        )
    network = check_mapping_keys("the network of the costs", content.get("network") or {}, _NETWORK_KEYS)
    latency, bandwidth = network.get("latency"), network.get("bandwidth")
    streams = content.get("device_streams", False)
    check_choice("device_streams of the costs", streams, (False, True), PlanError)
    cores = content.get("cores")
    return CostsSpec(
        {str(name): _parse_task_cost(str(name), cost) for name, cost in tasks.items()},
        _parse_number("between_ms of the costs", content.get("between_ms", 0.0)) / 1e3,
        None if cores is None else _parse_number("cores of the costs", cores),
        streams,
        None if latency is None else _parse_quantity("the network of the costs", parse_duration, latency),
        None if bandwidth is None else _parse_quantity("the network of the costs", parse_bandwidth, bandwidth),
    )


def _parse_task_cost(name: str, entry: Any) -> TaskCost:
    where = f"task {name!r} of the costs"
    if isinstance(entry, int | float) and not isinstance(entry, bool):
        entry = {"ms": entry}
    check_mapping_keys(where, entry, _TASK_KEYS)
    kinds = [key for key in (*_KINDS, "background_ms") if key in entry]
    if len(kinds) > 1:
        raise PlanError(
            f"{where} has {' and '.join(kinds)}, expected at most one, since a task submits one piece of background"
            " work. Remove the others."
        )
    waited_by = None if entry.get("waited_by") is None else str(entry["waited_by"])
    background: float | Collective = 0.0
    if kinds == ["background_ms"]:
        background = _parse_number(f"background_ms of {where}", entry["background_ms"]) / 1e3
    elif kinds:
        kind = next(known_kind for known_kind in _KINDS if known_kind == kinds[0])
        background = Collective(kind, _parse_quantity(where, parse_size, entry[kind]))
    resource, background_resource = entry.get("resource", "compute"), entry.get("background_resource", "network")
    seconds = _parse_number(f"ms of {where}", entry.get("ms", 0.0)) / 1e3
    launch = _parse_number(f"launch_ms of {where}", entry.get("launch_ms", 0.0)) / 1e3
    try:
        return TaskCost(seconds, resource, background, background_resource, waited_by, launch)
    except PlanError as error:
        raise PlanError(f"{where} is not valid: {error}") from error


def _parse_number(subject: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
        raise PlanError(f"{subject} must be a number from 0 to {_MOST:g}, got {short_repr(value)}. Correct the value.")
    return float(value)


def _parse_quantity(subject: str, parse: Any, value: Any) -> float:
    try:
        return float(parse(str(value)))
    except SetupError as error:
        raise PlanError(f"{subject}: {error}") from error
