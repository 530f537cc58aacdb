"""What tasks cost and what a machine can do at once: the figures that simulation and planning start from.

Tested in ``tests/engine/planning/test_costs_yaml.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.common.safe_text import shown
from lightning_pipe.engine.planning.network import Message, NetworkModel
from lightning_pipe.engine.plans.dependencies import required_dependencies
from lightning_pipe.engine.plans.task import PipelineTask

Resource = Literal["compute", "copy", "network", "disk", "host"]
RESOURCES: tuple[Resource, ...] = get_args(Resource)

# On a device with streams, the thread does these itself; the rest it submits, and the device does it.
DONE_BY_THREAD: frozenset[Resource] = frozenset({"host", "disk"})


# Seconds, of one task: eleven days. Of much more, sums would lose the rest, and then be infinite.
LONGEST = 1e6
_FEWEST_LANES, _MOST_LANES = 1e-3, 1e6


@dataclass(frozen=True)
class TaskCost:
    """What one run of a task takes, once it has all that it depends on and no other work is on its resources.

    Args:
        seconds: how long the task works; for that long it holds its thread. On a device with streams it holds its
            stream, and its thread for *launch* only, unless *resource* is ``"host"`` or ``"disk"``.
        resource: what it works on. ``"host"`` is the Python interpreter, which one thread has at a time.
        background: work that the task has submitted when it ends and that goes on beside whatever follows: seconds, or
            a collective whose seconds the machine's network model gives.
        background_resource: what that works on.
        waited_by: the task that waits for the background work, at its beginning. With the task's own name it waits
            itself, at its end: a lookup followed by an exchange that it waits for.
        launch: seconds of the thread (on ``"host"``) to submit the work on a device with streams; otherwise unused.

    Raises:
        PlanError: an unknown resource, or a time that is negative or not finite.
    """

    seconds: float
    resource: Resource = "compute"
    background: float | Message = 0.0
    background_resource: Resource = "network"
    waited_by: str | None = None
    launch: float = 0.0

    def __post_init__(self) -> None:
        for what, resource in (("resource", self.resource), ("background_resource", self.background_resource)):
            if resource not in RESOURCES:
                raise PlanError(f"a task's cost has {what} {resource!r}; the resources are {', '.join(RESOURCES)}")
        background = 0.0 if isinstance(self.background, Message) else self.background
        for what, seconds in (("seconds", self.seconds), ("background", background), ("launch", self.launch)):
            if not 0 <= seconds <= LONGEST:
                raise PlanError(f"a task's cost has {what} {shown(seconds)}; give seconds, from 0 to {LONGEST:g}")


# What is left of a task that is replayed.
NO_COST = TaskCost(0.0)


@dataclass(frozen=True)
class Machine:
    """What a rank's tasks share.

    A resource with *n* users and *c* lanes gives each of them ``min(1, c / n)`` of its full speed: cores under a fair
    scheduler, connections on one link, kernels on one device.

    Args:
        cores: lanes of ``"compute"``: what runs at full speed side by side. Cores of a CPU that are free for tasks, 1
            for an accelerator. Need not be whole: two threads that slow each other down by a fifth have 1.6.
        lanes: lanes of other resources, where they are not 1.
        network: gives messages their seconds.
        device_streams: whether the device has streams. Then tasks hold their stream rather than their thread.
        between_periods: seconds of the main thread in each period outside its tasks: fetching, hooks, logging.

    Raises:
        PlanError: a resource that is unknown or has no lane.
    """

    cores: float = 2
    lanes: Mapping[Resource, float] = field(default_factory=dict)
    network: NetworkModel | None = None
    device_streams: bool = False
    between_periods: float = 0.0

    def __post_init__(self) -> None:
        for resource, lanes in (("compute", self.cores), *self.lanes.items()):
            if resource not in RESOURCES:
                raise PlanError(f"the machine has the resource {resource!r}; the resources are {', '.join(RESOURCES)}")
            if not _FEWEST_LANES <= lanes <= _MOST_LANES:
                raise PlanError(
                    f"the machine has {shown(lanes)} lanes of {resource}; give a number above 0, from"
                    f" {_FEWEST_LANES:g} to {_MOST_LANES:g}"
                )
        if not 0 <= self.between_periods <= LONGEST:
            raise PlanError(
                f"the machine has between_periods {shown(self.between_periods)}; give seconds, from 0 to {LONGEST:g}"
            )

    def lanes_of(self, resource: Resource) -> float:
        """How many users *resource* serves at full speed."""
        return self.cores if resource == "compute" else self.lanes.get(resource, 1)

    def by_device(self, cost: TaskCost) -> bool:
        """Whether the device works on it while its thread goes on."""
        return self.device_streams and cost.resource not in DONE_BY_THREAD


def duration(name: str, cost: TaskCost) -> float:
    """Seconds from the start of the task called *name*, when all it waits for has come, to its end."""
    assert isinstance(cost.background, float | int)
    return cost.seconds + (cost.background if cost.waited_by == name else 0.0)


class Load(NamedTuple):
    """Work on one resource."""

    resource: Resource
    seconds: float


def loads(cost: TaskCost, machine: Machine) -> list[Load]:
    """All work of one run, of costs that :func:`checked_costs` returned."""
    assert isinstance(cost.background, float | int)
    found = [Load(cost.resource, cost.seconds), Load(cost.background_resource, cost.background)]
    if machine.by_device(cost):
        found.append(Load("host", cost.launch))
    return [load for load in found if load.seconds > 0]


def checked_costs(
    tasks: Sequence[PipelineTask], costs: Mapping[str, TaskCost], machine: Machine
) -> dict[str, TaskCost]:
    """The costs of *tasks*, in their order, with every message replaced by its seconds on the machine's network.

    Raises:
        PlanError: a task without a cost, a cost without a task, a message without a network model, or a task that is
            said to wait for work which, by what the tasks declare, need not be submitted before it.
    """
    names = [task.name for task in tasks]
    missing = [name for name in names if name not in costs]
    if missing:
        raise PlanError(f"no cost is given for {', '.join(missing)}; measure every task, or say 0 for what takes none")
    unknown = [name for name in costs if name not in names]
    if unknown:
        raise PlanError(f"a cost is given for the unknown task {unknown[0]!r}; the tasks are {', '.join(names)}")
    after: dict[str, set[str]] | None = None
    checked = {}
    for name in names:
        cost = costs[name]
        if cost.waited_by is not None and cost.waited_by != name:
            after = _followers(tasks) if after is None else after
            if cost.waited_by not in after[name]:
                raise PlanError(
                    f"the background work of {name!r} is waited for by {cost.waited_by!r}, which does not depend on it;"
                    f" one of {', '.join(sorted(after[name])) or 'no task'} can wait for it, or declare the field in"
                    " which the work is handed over"
                )
        if isinstance(cost.background, Message):
            if machine.network is None:
                raise PlanError(
                    f"the background work of {name!r} is a message of {cost.background.bytes:g} bytes, but the machine"
                    " has no network; give it a NetworkModel"
                )
            seconds = machine.network.seconds(cost.background)
            if seconds > LONGEST:
                raise PlanError(
                    f"the background work of {name!r}, a message of {cost.background.bytes:g} bytes, takes"
                    f" {seconds:g} seconds on this network; expected at most {LONGEST:g}"
                )
            cost = replace(cost, background=seconds)
        checked[name] = cost
    return checked


def without(cost: TaskCost, resource: Resource) -> TaskCost:
    """The cost of a task whose work on *resource* takes no time."""
    return replace(
        cost,
        seconds=0.0 if cost.resource == resource else cost.seconds,
        background=0.0 if cost.background_resource == resource else cost.background,
        launch=0.0 if resource == "host" else cost.launch,
    )


def _followers(tasks: Sequence[PipelineTask]) -> dict[str, set[str]]:
    """By task, those of the same iteration that can only run after it."""
    edges = [(d.upstream, d.downstream) for d in required_dependencies(tasks) if d.distance == 0]
    after: dict[str, set[str]] = {}
    for name in reversed([task.name for task in tasks]):
        direct = {downstream for upstream, downstream in edges if upstream == name}
        after[name] = direct.union(*(after[downstream] for downstream in direct))
    return after


def awaited(costs: Mapping[str, TaskCost]) -> Iterable[tuple[str, str]]:
    """Pairs of a task and another one that waits for its background work."""
    for name, cost in costs.items():
        if cost.waited_by is not None and cost.waited_by != name and cost.background:
            yield name, cost.waited_by
