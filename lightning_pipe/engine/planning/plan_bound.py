"""What no plan can be faster than.

Tested in ``tests/engine/planning/test_planner.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.planning.costs import Machine, TaskCost, awaited, checked_costs, duration, loads
from lightning_pipe.engine.planning.cycle_ratio import Cycle, Edge, maximum_cycle_ratio
from lightning_pipe.engine.plans.dependencies import Dependency, required_dependencies
from lightning_pipe.engine.plans.task import PipelineTask

_RETIRED = ("", "retired")  # no task: when a batch is done with and another one may begin


class Bound(NamedTuple):
    """A time per iteration that no plan undercuts.

    Args:
        seconds: per iteration.
        reason: what takes that long.
        cycle: the dependencies that take it, as (upstream, downstream, distance); empty where it is a resource.
    """

    seconds: float
    reason: str
    cycle: tuple[tuple[str, str, int], ...] = ()


def lower_bound(
    tasks: Sequence[PipelineTask],
    costs: Mapping[str, TaskCost],
    depth: int,
    machine: Machine | None = None,
    stale: Iterable[Dependency] = (),
    on_main: Collection[str] = (),
) -> Bound:
    """The larger of the busiest resource and, over every cycle of dependencies, its duration per iteration it spans.

    Cycles come from state that an iteration leaves to the next, and from batches in flight: as one more begins only
    when the oldest is done, a batch's longest way through its tasks is shared by *depth* batches. A task by itself is
    one too, since one thread runs it for all batches.

    Args:
        tasks: in the order in which a serial iteration runs them.
        costs: of every task.
        depth: the most batches in flight.
        machine: what the tasks share; by default as for a simulation.
        stale: required dependencies that are given up.
        on_main: tasks that only the main thread may run, which is then a resource like the others.

    Raises:
        PlanError: costs that do not fit the tasks, a depth below 1, or an unknown task in *on_main*.
    """
    if depth < 1:
        raise PlanError(f"a pipeline with {depth} batches in flight trains nothing; give a depth of 1 or more")
    machine = machine or Machine()
    costs = checked_costs(tasks, costs, machine)
    if unknown := [name for name in on_main if name not in costs]:
        raise PlanError(f"on_main names the unknown task {unknown[0]!r}; the tasks are {', '.join(costs)}")
    cycle = maximum_cycle_ratio(iteration_edges(tasks, costs, depth, machine, stale))
    bounds = [] if cycle is None else [_of_cycle(cycle, depth)]
    bounds += [
        Bound(seconds, f"{what} is busy for {_ms(seconds)} an iteration")
        for what, seconds in _busy(costs, machine, on_main).items()
    ]
    highest = max(bound.seconds for bound in bounds)
    # Of several that are the same but for rounding, the first, which says most.
    return next(bound for bound in bounds if bound.seconds >= highest * (1 - 1e-9))


def iteration_edges(
    tasks: Sequence[PipelineTask],
    costs: Mapping[str, TaskCost],
    depth: int,
    machine: Machine,
    stale: Iterable[Dependency] = (),
) -> list[Edge]:
    """What has to wait for what, and how long after its start: between tasks, and from batch to batch.

    Args:
        tasks: see :func:`lower_bound`, as for the others.
        costs: as :func:`~lightning_pipe.engine.planning.costs.checked_costs` returned them.
        depth: see there.
        machine: see there.
        stale: see there.
    """
    edges = []
    for dependency in required_dependencies(tasks, stale):
        up, down = costs[dependency.upstream], costs[dependency.downstream]
        # A thread goes on when what it waits for is submitted; that it is done is for other streams to wait for.
        submitted = machine.by_device(up) and not machine.by_device(down)
        seconds = up.launch if submitted else duration(dependency.upstream, up)
        edges.append(Edge(dependency.upstream, dependency.downstream, seconds, dependency.distance))
    for submitter, waiter in awaited(costs):
        background = costs[submitter].background
        assert isinstance(background, float | int)
        edges.append(Edge(submitter, waiter, costs[submitter].seconds + background, 0))
    for name, cost in costs.items():
        held = cost.launch if machine.by_device(cost) else duration(name, cost)
        edges.append(Edge(name, name, duration(name, cost), 1))
        edges.append(Edge(name, _RETIRED, held, 0))
        edges.append(Edge(_RETIRED, name, machine.between_periods, depth))
    return edges


def _busy(costs: Mapping[str, TaskCost], machine: Machine, on_main: Collection[str]) -> dict[str, float]:
    busy: dict[str, float] = {}
    for cost in costs.values():
        for load in loads(cost, machine):
            lanes = machine.lanes_of(load.resource)
            what = load.resource if lanes == 1 else f"{load.resource} ({lanes:g} lanes)"
            busy[what] = busy.get(what, 0.0) + load.seconds / lanes
    held = [
        cost.launch if machine.by_device(cost) else duration(name, cost)
        for name, cost in costs.items()
        if name in on_main
    ]
    busy["the main thread"] = machine.between_periods + sum(held)
    return busy


def _of_cycle(cycle: Cycle, depth: int) -> Bound:
    # From where one iteration hands over to the next, as a reader follows it.
    handed_over = next(i for i, edge in enumerate(cycle.edges) if edge.distance) + 1
    edges = (*cycle.edges[handed_over:], *cycle.edges[:handed_over])
    tasks = [str(edge.upstream) for edge in edges if edge.upstream is not _RETIRED]
    between = tuple(
        (str(edge.upstream), str(edge.downstream), edge.distance)
        for edge in edges
        if _RETIRED not in (edge.upstream, edge.downstream) and edge.upstream != edge.downstream
    )
    if len(tasks) < len(edges):
        reason = f"a batch takes {_ms(cycle.seconds)} from its first task to its last"
        reason += f" ({' -> '.join(tasks)}), with {depth} in flight"
    elif len(tasks) == 1:
        reason = f"{tasks[0]} takes {_ms(cycle.seconds)}, for one batch after the other"
    else:
        reason = f"{' -> '.join((*tasks, tasks[0]))} takes {_ms(cycle.seconds)} and spans"
        reason += f" {cycle.iterations} iteration{'s' if cycle.iterations > 1 else ''}"
    return Bound(cycle.ratio, reason, between)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
