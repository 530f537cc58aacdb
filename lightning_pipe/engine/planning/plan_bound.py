"""Lower bound on the iteration time of all plans."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.planning.costs import Machine, TaskCost, awaited, checked_costs, duration, held, used
from lightning_pipe.engine.planning.cycle_ratio import Cycle, Edge, maximum_cycle_ratio
from lightning_pipe.engine.plans.dependencies import Dependency, required_dependencies
from lightning_pipe.engine.plans.task import PipelineTask

_RETIRED = ("", "retired")  # node that is not a task: a batch is retired and another one may start


class Bound(NamedTuple):
    """Lower bound on the iteration time.

    Args:
        seconds: seconds per iteration.
        reason: explanation for readers.
        cycle: dependencies that cause the bound, as (upstream, downstream, distance). Empty if a resource causes it.
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
    """Lower bound on the iteration time of all plans.

    The bound is the larger of two times: the time for which the busiest resource is in use, and the longest duration of
    a cycle of dependencies per iteration that it spans. Cycles come from three sources: state that an iteration passes
    to the next; the limit on batches in flight, which lets a batch start only when the batch *depth* batches earlier is
    done; and single tasks, because one thread runs a task for all batches.

    Args:
        tasks: tasks in the order in which a serial iteration runs them.
        costs: cost of every task, by name.
        depth: maximum number of batches in flight.
        machine: resources that the tasks share (default ``Machine()``).
        stale: required dependencies that the plan omits (default none).
        on_main: names of the tasks that must run in the main thread (default none), which then counts as a resource.

    Raises:
        PlanError: the costs do not fit the tasks, *depth* is less than 1, or *on_main* has an unknown task.
    """
    if depth < 1:
        raise PlanError(f"the depth must be at least 1, got {depth}. Give the maximum number of batches in flight.")
    machine = machine or Machine()
    costs = checked_costs(tasks, costs, machine)
    if unknown := [name for name in on_main if name not in costs]:
        raise PlanError(f"on_main names the unknown task {unknown[0]!r}. Remove it, or use one of {', '.join(costs)}.")
    cycle = maximum_cycle_ratio(iteration_edges(tasks, costs, depth, machine, stale))
    bounds = [] if cycle is None else [_of_cycle(cycle, depth)]
    bounds += [
        Bound(seconds, f"{what} is busy for {_ms(seconds)} per iteration")
        for what, seconds in _busy(costs, machine, on_main).items()
    ]
    highest = max(bound.seconds for bound in bounds)
    # Of bounds that differ only by rounding, take the first one, because its reason is the most specific.
    return next(bound for bound in bounds if bound.seconds >= highest * (1 - 1e-9))


def iteration_edges(
    tasks: Sequence[PipelineTask],
    costs: Mapping[str, TaskCost],
    depth: int,
    machine: Machine,
    stale: Iterable[Dependency] = (),
) -> list[Edge]:
    """Edges that every plan obeys: between tasks, from a batch to the next, and from a retired batch to a new one.

    Args:
        tasks: see :func:`lower_bound`, also for *depth*, *machine* and *stale*.
        costs: costs as returned by :func:`~lightning_pipe.engine.planning.costs.checked_costs`.
    """
    edges = []
    for dependency in required_dependencies(tasks, stale):
        up, down = costs[dependency.upstream], costs[dependency.downstream]
        # A thread only waits until device work is submitted. Streams wait until it is done.
        submitted = machine.by_device(up) and not machine.by_device(down)
        seconds = up.launch if submitted else duration(dependency.upstream, up)
        edges.append(Edge(dependency.upstream, dependency.downstream, seconds, dependency.distance))
    for submitter, waiter in awaited(costs):
        background = costs[submitter].background
        assert isinstance(background, float | int)
        edges.append(Edge(submitter, waiter, costs[submitter].seconds + background, 0))
    for name, cost in costs.items():
        edges.append(Edge(name, name, duration(name, cost), 1))
        edges.append(Edge(name, _RETIRED, held(name, cost, machine), 0))
        edges.append(Edge(_RETIRED, name, machine.between_periods, depth))
    return edges


def _busy(costs: Mapping[str, TaskCost], machine: Machine, on_main: Collection[str]) -> dict[str, float]:
    busy: dict[str, float] = {}
    for resource, seconds in used(costs, machine).items():
        lanes = machine.lanes_of(resource)
        busy[resource if lanes == 1 else f"{resource} ({lanes:g} lanes)"] = seconds
    on_main_thread = [held(name, cost, machine) for name, cost in costs.items() if name in on_main]
    busy["the main thread"] = machine.between_periods + sum(on_main_thread)
    return busy


def _of_cycle(cycle: Cycle, depth: int) -> Bound:
    # Start after an edge that leads to the next iteration, which is the easiest order to follow.
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
