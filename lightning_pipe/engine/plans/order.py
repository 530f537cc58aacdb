"""Submission order of the tasks of a period, consistent with thread-group queues and dependencies.

A period submits every task once, each for its own iteration. The queue of each thread group is a subsequence of this
total order, and a task only waits for tasks submitted before it, so deadlocks are impossible.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.plans.dependencies import Dependency


def check_order(plan: str, order: Sequence[str], tasks: Sequence[str], same_period: Iterable[Dependency]) -> None:
    """Check a given *order* against the dependencies between tasks that run in the same period.

    Raises:
        PlanError: a task is missing or repeated, or precedes a task that it depends on.
    """
    if sorted(order) != sorted(tasks):
        counts = Counter(order)
        missing = [task for task in tasks if task not in counts]
        repeated = sorted(task for task, count in counts.items() if count > 1)
        raise PlanError(
            f"plan {plan!r}: order must name each task once; missing: {', '.join(missing) or 'none'}, repeated:"
            f" {', '.join(repeated) or 'none'}"
        )
    position = {task: index for index, task in enumerate(order)}
    for dependency in same_period:
        if position[dependency.upstream] > position[dependency.downstream]:
            raise PlanError(
                f"plan {plan!r} has no common order of group queues, dependencies and submissions: order submits"
                f" {dependency.downstream} before {dependency.upstream}, but in the same period {dependency};"
                f" move {dependency.upstream} forward or give it a higher stage"
            )


def derive_order(tasks: Sequence[str], stages: Mapping[str, int], same_period: Iterable[Dependency]) -> tuple[str, ...]:
    """Derive an order that satisfies *same_period*, preferring higher stages, then program order.

    Such an order always exists. Around a cycle of dependencies the stages cancel out, so a cycle inside one period has
    only distances of 0, and :func:`find_cycle` would have found it.
    """
    rank = {task: (-stages[task], index) for index, task in enumerate(tasks)}
    sorter = _sorter(tasks, same_period)
    sorter.prepare()
    ready: list[tuple[tuple[int, int], str]] = []
    order: list[str] = []
    while sorter.is_active():
        for task in sorter.get_ready():
            heapq.heappush(ready, (rank[task], task))
        order.append(heapq.heappop(ready)[1])
        sorter.done(order[-1])
    return tuple(order)


def find_cycle(tasks: Sequence[str], dependencies: Iterable[Dependency]) -> list[str]:
    """Tasks along one cycle of *dependencies*, with the first task repeated at the end; empty without a cycle."""
    try:
        _sorter(tasks, dependencies).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _sorter(tasks: Sequence[str], dependencies: Iterable[Dependency]) -> TopologicalSorter[str]:
    sorter = TopologicalSorter[str](dict.fromkeys(tasks, ()))
    for dependency in dependencies:
        sorter.add(dependency.downstream, dependency.upstream)
    return sorter
