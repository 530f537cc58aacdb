"""Costs of tasks and the capacity of the machine, which simulation and planning start from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.common.safe_text import short_repr
from lightning_pipe.engine.planning.network import Collective, NetworkModel
from lightning_pipe.engine.plans.dependencies import required_dependencies
from lightning_pipe.engine.plans.task import PipelineTask

Resource = Literal["compute", "copy", "network", "disk", "host"]
RESOURCES: tuple[Resource, ...] = get_args(Resource)

# On a device with streams, a thread works on these resources synchronously. It only submits all other work.
THREAD_BLOCKING_RESOURCES: frozenset[Resource] = frozenset({"host", "disk"})


# Longest time of one task, in seconds (eleven days). Sums with much larger values would lose precision or overflow.
MAX_TASK_SECONDS = 1e6
_FEWEST_CORES, _MOST_CORES = 1e-3, 1e6


@dataclass(frozen=True)
class TaskCost:
    """Cost of one run of a task whose dependencies are met and whose resources are otherwise idle."""

    # Holds the task's thread; on a device with streams its stream instead, unless the resource is "host" or "disk".
    seconds: float
    resource: Resource = "compute"  # "host" is the Python interpreter, which one thread holds at a time
    background: float | Collective = 0.0  # work that continues after the task has ended: seconds or a collective
    background_resource: Resource = "network"
    waited_by: str | None = None  # task that waits for the background work at its start; this task: at its end
    launch: float = 0.0  # seconds of "host" to submit the work to a device with streams

    def __post_init__(self) -> None:
        for name, resource in (("resource", self.resource), ("background_resource", self.background_resource)):
            if resource not in RESOURCES:
                raise PlanError(
                    f"the {name} of a task's cost is {resource!r}, which is unknown. Use one of {', '.join(RESOURCES)}."
                )
        background = 0.0 if isinstance(self.background, Collective) else self.background
        for name, seconds in (("seconds", self.seconds), ("background", background), ("launch", self.launch)):
            if not 0 <= seconds <= MAX_TASK_SECONDS:
                raise PlanError(
                    f"{name} of a task's cost must be from 0 to {MAX_TASK_SECONDS:g} seconds, got"
                    f" {short_repr(seconds)}. Correct the cost of this task."
                )


# Cost of a replayed task.
NO_COST = TaskCost(0.0)


@dataclass(frozen=True)
class Machine:
    """Resources that the tasks of one rank share.

    A resource with *n* users and *c* lanes gives each user ``min(1, c / n)`` of its full speed. This models cores under
    a fair scheduler, connections on one link, and kernels on one device.
    """

    cores: float = 2  # lanes of "compute"; threads that slow each other down by a fifth have 1.6; others have one
    network: NetworkModel | None = None
    device_streams: bool = False  # tasks then hold their stream instead of their thread
    between_periods: float = 0.0  # seconds of the main thread in each period outside tasks, such as hooks

    def __post_init__(self) -> None:
        if not _FEWEST_CORES <= self.cores <= _MOST_CORES:
            raise PlanError(
                f"the machine has {short_repr(self.cores)} cores, expected {_FEWEST_CORES:g} to {_MOST_CORES:g}. Give a"
                " number above 0 in this range."
            )

    def count_resource_lanes(self, resource: Resource) -> float:
        """Number of users that *resource* serves at full speed."""
        return self.cores if resource == "compute" else 1.0

    def runs_on_device(self, cost: TaskCost) -> bool:
        """Return True if the device does the work of *cost* while its thread continues."""
        return self.device_streams and cost.resource not in THREAD_BLOCKING_RESOURCES


class Load(NamedTuple):
    """Work on one resource."""

    resource: Resource
    seconds: float


def split_cost_by_resource(cost: TaskCost, machine: Machine) -> list[Load]:
    """All work of one run of a task. *cost* must come from :func:`convert_costs_to_seconds`."""
    assert isinstance(cost.background, float | int)
    candidates = [Load(cost.resource, cost.seconds), Load(cost.background_resource, cost.background)]
    if machine.runs_on_device(cost):
        candidates.append(Load("host", cost.launch))
    return [load for load in candidates if load.seconds > 0]


def sum_seconds_by_resource(costs: Mapping[str, TaskCost], machine: Machine) -> dict[Resource, float]:
    """Seconds per iteration for which each resource is in use, averaged over its lanes."""
    seconds: dict[Resource, float] = {}
    for cost in costs.values():
        for load in split_cost_by_resource(cost, machine):
            seconds[load.resource] = seconds.get(load.resource, 0.0) + load.seconds / machine.count_resource_lanes(
                load.resource
            )
    return seconds


def convert_costs_to_seconds(
    tasks: Sequence[PipelineTask], costs: Mapping[str, TaskCost], machine: Machine
) -> dict[str, TaskCost]:
    """Costs in the order of *tasks*, with every message replaced by its seconds on the machine's network."""
    names = [task.name for task in tasks]
    missing = [name for name in names if name not in costs]
    if missing:
        raise PlanError(
            f"no cost is given for {', '.join(missing)}. Measure every task, or give 0 for a task that takes no time."
        )
    unknown = [name for name in costs if name not in names]
    if unknown:
        raise PlanError(
            f"a cost is given for the unknown task {unknown[0]!r}. Remove it, or use one of {', '.join(names)}."
        )
    after: dict[str, set[str]] | None = None
    checked = {}
    for name in names:
        cost = costs[name]
        if cost.waited_by is not None and cost.waited_by != name:
            after = _followers(tasks) if after is None else after
            if cost.waited_by not in after[name]:
                raise PlanError(
                    f"{cost.waited_by!r} is set to wait for the background work of {name!r}, but does not depend on it"
                    f" (these tasks do: {', '.join(sorted(after[name])) or 'none'}). Set waited_by to a task that does,"
                    " or declare the field that passes the work on."
                )
        if isinstance(cost.background, Collective):
            assert machine.network is not None
            cost = replace(cost, background=machine.network.seconds(cost.background))
        checked[name] = cost
    return checked


def remove_resource_from_cost(cost: TaskCost, resource: Resource) -> TaskCost:
    """Copy of *cost* in which the work on *resource* takes no time."""
    return replace(
        cost,
        seconds=0.0 if cost.resource == resource else cost.seconds,
        background=0.0 if cost.background_resource == resource else cost.background,
        launch=0.0 if resource == "host" else cost.launch,
    )


def _followers(tasks: Sequence[PipelineTask]) -> dict[str, set[str]]:
    """Tasks of the same iteration that depend on a task, directly or indirectly, by the name of that task."""
    edges = [(d.upstream, d.downstream) for d in required_dependencies(tasks) if d.distance == 0]
    after: dict[str, set[str]] = {}
    for name in reversed([task.name for task in tasks]):
        direct = {downstream for upstream, downstream in edges if upstream == name}
        after[name] = direct.union(*(after[downstream] for downstream in direct))
    return after


def list_background_work_waiters(costs: Mapping[str, TaskCost]) -> Iterable[tuple[str, str]]:
    """Pairs of a task with background work and the other task that waits for this work."""
    for name, cost in costs.items():
        if cost.waited_by is not None and cost.waited_by != name and cost.background:
            yield name, cost.waited_by
