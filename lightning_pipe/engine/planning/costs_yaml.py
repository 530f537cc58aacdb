"""Costs of tasks as YAML::

    between_ms: 0.2                 # of the main thread in each iteration, outside its tasks
    cores: 2                        # for the tasks of one rank
    device_streams: false           # whether a device does the work, in streams
    network: {latency: 30us, bandwidth: 1GB/s}
    tasks:
      Copy: {ms: 0.4, resource: copy}
      Exchange: {ms: 0.1, all_to_all: 2MB, waited_by: Train}
      Train: {ms: 5.0}

Only *tasks* is needed. Of a task everything has a default:

===================== ==================================================================================
``ms``                how long it works, on ``resource`` (compute, copy, network, disk, host)
``launch_ms``         of its thread, to submit the work to a device with streams
``all_to_all``,       bytes of one rank's buffer of a collective that the task submits: seconds follow
``all_reduce``,       from the network
``broadcast``
``background_ms``     in their place, what it submits takes so long, on ``background_resource`` (network)
``waited_by``         the task that waits for that; the task itself, if it does
===================== ==================================================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from lightning_pipe.engine.common.checked_yaml import check_keys, load_mapping
from lightning_pipe.engine.common.errors import PlanError, SetupError
from lightning_pipe.engine.common.quantities import parse_bandwidth, parse_duration, parse_size
from lightning_pipe.engine.common.safe_text import shown
from lightning_pipe.engine.planning.costs import LONGEST, TaskCost
from lightning_pipe.engine.planning.network import CollectiveKind, Message

__all__ = ["CostsFile", "load_costs"]

_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
_KEYS = ("between_ms", "cores", "device_streams", "network", "tasks")
_TASK_KEYS = ("ms", "resource", "launch_ms", *_KINDS, "background_ms", "background_resource", "waited_by")
_NETWORK_KEYS = ("latency", "bandwidth")
_MOST = 1e3 * LONGEST  # milliseconds
_EXAMPLE = "the example in docs/simulation.md"


@dataclass(frozen=True)
class CostsFile:
    """What a file of costs says.

    Args:
        tasks: costs by task.
        between_periods: seconds of an iteration outside of tasks.
        cores: for the tasks of one rank; None where the file does not say.
        device_streams: whether the device has streams.
        latency: of the network, in seconds; None where the file does not say.
        bandwidth: of the network, in bytes a second; None where the file does not say.
    """

    tasks: Mapping[str, TaskCost] = field(default_factory=dict)
    between_periods: float = 0.0
    cores: float | None = None
    device_streams: bool = False
    latency: float | None = None
    bandwidth: float | None = None

    @property
    def has_messages(self) -> bool:
        """Whether the number of ranks makes a difference."""
        return any(isinstance(cost.background, Message) for cost in self.tasks.values())


def load_costs(text: str) -> CostsFile:
    """Costs from YAML *text*, in the format that this module's docstring shows.

    Raises:
        PlanError: it is not YAML, or has a key or value that makes no sense.
    """
    content = load_mapping(text, "file of costs", _KEYS, compare=_EXAMPLE)
    tasks = content.get("tasks")
    if not isinstance(tasks, dict) or not tasks:
        raise PlanError(f"the costs' 'tasks' map each task to its cost; found {shown(tasks)}. See {_EXAMPLE}")
    names = [str(name) for name in tasks]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise PlanError(f"the costs name the task {twice[0]!r} twice, as text and as a number; say it once")
    network = content.get("network") or {}
    if not isinstance(network, dict):
        raise PlanError(f"the costs have network {shown(network)}; write a mapping of {' and '.join(_NETWORK_KEYS)}")
    check_keys("the network of the costs", network, _NETWORK_KEYS)
    latency, bandwidth = network.get("latency"), network.get("bandwidth")
    streams = content.get("device_streams", False)
    if not isinstance(streams, bool):
        raise PlanError(f"the costs have device_streams {shown(streams)}; write true or false")
    cores = content.get("cores")
    seconds = None if latency is None else _parsed("the network of the costs", parse_duration, latency)
    if seconds is not None and seconds > LONGEST:
        raise PlanError(f"the network of the costs has latency {shown(latency)}; write at most {LONGEST:g}s")
    return CostsFile(
        {str(name): _cost(str(name), cost) for name, cost in tasks.items()},
        _number("the costs have between_ms", content.get("between_ms", 0.0)) / 1e3,
        None if cores is None else _number("the costs have cores", cores),
        streams,
        seconds,
        None if bandwidth is None else _parsed("the network of the costs", parse_bandwidth, bandwidth),
    )


def _cost(name: str, given: Any) -> TaskCost:
    where = f"task {name!r} of the costs"
    if isinstance(given, int | float) and not isinstance(given, bool):
        given = {"ms": given}
    if not isinstance(given, dict):
        raise PlanError(f"{where} has {shown(given)}; write its milliseconds, or a mapping of {', '.join(_TASK_KEYS)}")
    check_keys(where, given, _TASK_KEYS)
    kinds = [key for key in (*_KINDS, "background_ms") if key in given]
    if len(kinds) > 1:
        raise PlanError(f"{where} has {' and '.join(kinds)}; a task submits one thing that is waited for: give one")
    waited_by = given.get("waited_by")
    if waited_by is not None and not kinds:
        raise PlanError(f"{where} is waited_by {shown(waited_by)}, but submits nothing; say what, as all_to_all: 2MB")
    background: float | Message = 0.0
    if kinds == ["background_ms"]:
        background = _number(f"{where} has background_ms", given["background_ms"]) / 1e3
    elif kinds:
        kind = next(one for one in _KINDS if one == kinds[0])
        background = Message(kind, _parsed(where, parse_size, given[kind]))
    if waited_by is not None and not isinstance(waited_by, str):
        raise PlanError(f"{where} is waited_by {shown(waited_by)}; write the name of one task")
    resource, other = given.get("resource", "compute"), given.get("background_resource", "network")
    seconds = _number(f"{where} has ms", given.get("ms", 0.0)) / 1e3
    launch = _number(f"{where} has launch_ms", given.get("launch_ms", 0.0)) / 1e3
    try:
        return TaskCost(seconds, resource, background, other, waited_by, launch)
    except PlanError as error:
        raise PlanError(f"{where} is wrong: {error}") from error


def _number(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
        raise PlanError(f"{what} {shown(value)}; write a number from 0 to {_MOST:g}")
    return float(value)


def _parsed(what: str, parse: Any, value: Any) -> float:
    try:
        return float(parse(str(value)))
    except SetupError as error:
        raise PlanError(f"{what}: {error}") from error
