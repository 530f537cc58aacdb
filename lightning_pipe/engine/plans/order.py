"""Submission order of the tasks of a period, consistent with thread-group queues and dependencies.

A period submits every task once, each for its own iteration. The queue of each thread group is a subsequence of this
total order, and a task only waits for tasks submitted before it, so deadlocks are impossible.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeVar

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.plans.dependencies import Dependency

T = TypeVar("T", str, int)


def check_order(plan: str, order: Sequence[str], tasks: Sequence[str], same_period: Iterable[Dependency]) -> None:
    """Check a given *order* against the dependencies between tasks that run in the same period."""
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
    """Derive an order that satisfies *same_period*, preferring higher stages, then program order."""
    rank = {task: (-stages[task], index) for index, task in enumerate(tasks)}
    order = topological_order(
        tasks, ((dependency.upstream, dependency.downstream) for dependency in same_period), rank.__getitem__
    )
    assert order is not None
    return tuple(order)


def topological_order(
    tasks: Iterable[T], before: Iterable[tuple[T, T]], priority: Callable[[T], Any]
) -> list[T] | None:
    """Tasks in topological order, with the lowest rank first among those that are ready; None if there is a cycle."""
    missing = dict.fromkeys(tasks, 0)
    after: dict[T, list[T]] = {task: [] for task in missing}
    for up, down in before:
        after[up].append(down)
        missing[down] += 1
    ready = [(priority(task), task) for task, count in missing.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        task = heapq.heappop(ready)[1]
        order.append(task)
        for follower in after[task]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (priority(follower), follower))
    return order if len(order) == len(missing) else None


def find_cycle(tasks: Sequence[str], dependencies: Iterable[Dependency]) -> list[str]:
    """Tasks along one cycle of *dependencies*, with the first task repeated at the end; empty without a cycle."""
    sorter = TopologicalSorter[str](dict.fromkeys(tasks, ()))
    for dependency in dependencies:
        sorter.add(dependency.downstream, dependency.upstream)
    try:
        sorter.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []
