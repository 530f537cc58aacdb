"""Compact form of plans for a search, and their predicted iteration times.

A draft holds the stage, thread and position in the period of each task. Drafts are normalised, so that equivalent plans
have the same draft: a worker gets each task as early as dependencies allow, and workers are numbered in the order of
their first tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lightning_pipe.engine.planning.costs import Machine, TaskCost, checked_costs, held
from lightning_pipe.engine.planning.plan_limits import PlanLimits
from lightning_pipe.engine.planning.simulation import simulate
from lightning_pipe.engine.plans.dependencies import Dependency, required_dependencies
from lightning_pipe.engine.plans.order import sorted_by_rank
from lightning_pipe.engine.plans.plan import PipelinePlan
from lightning_pipe.engine.plans.schedule import MAIN, TaskSchedule
from lightning_pipe.engine.plans.task import PipelineTask

MAIN_THREAD = 0


class Draft(NamedTuple):
    """Plan as numbers, indexed by task.

    Args:
        stages: stage of each task.
        threads: thread of each task: 0 for the main thread, 1 and higher for workers.
        order: tasks in the order in which a period submits them.
    """

    stages: tuple[int, ...]
    threads: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def workers(self) -> int:
        """Number of worker threads."""
        return max(self.threads)


class PlanSpace:
    """Drafts for a set of tasks within limits, and their simulated iteration times.

    Args:
        tasks: see :func:`~lightning_pipe.engine.planning.planner.find_plans`, also for *costs* and *machine*.
        limits: limits that drafts keep.
        stale: required dependencies that the drafts omit (default none).
    """

    def __init__(
        self,
        tasks: Sequence[PipelineTask],
        costs: Mapping[str, TaskCost],
        limits: PlanLimits,
        machine: Machine,
        stale: Iterable[Dependency] = (),
    ) -> None:
        limits.check(tasks)
        self.tasks = list(tasks)
        self.names = [task.name for task in tasks]
        self.costs = checked_costs(tasks, costs, machine)
        self.limits = limits
        self.machine = machine
        self.stale = tuple(stale)
        index = {name: position for position, name in enumerate(self.names)}
        self.waits = [
            (index[d.upstream], index[d.downstream], d.distance) for d in required_dependencies(tasks, self.stale)
        ]
        self.first = [(index[first], index[then]) for first, then in limits.submitted_before]
        self.movable = tuple(index[name] for name in self.names if name in limits.on_workers)
        self.by_caller = frozenset(index[name] for name in limits.by_caller)
        self.on_main = [name for name in self.names if name not in limits.on_workers]
        self._seconds: dict[Draft, float] = {}

    # ------------------------------------------------------------------ drafts

    def draft(self, stages: Sequence[int], threads: Sequence[int], wanted: Sequence[int]) -> Draft | None:
        """Draft with an order close to *wanted*, which holds all tasks; None if no valid order exists."""
        if not self.allows(stages):
            return None
        before = [(up, down) for up, down, distance in self.waits if stages[up] + distance == stages[down]]
        before += self.first
        # First find the order within each thread, then submit the tasks of workers as early as this order allows.
        rank = {task: place for place, task in enumerate(wanted)}
        every = range(len(self.names))
        once = sorted_by_rank(every, before, rank.__getitem__)
        if once is None:
            return None
        threads = _renumbered(threads)
        place = {task: position for position, task in enumerate(once)}
        in_thread: dict[int, int] = {}
        for task in once:
            if threads[task] in in_thread:
                before.append((in_thread[threads[task]], task))
            in_thread[threads[task]] = task
        order = sorted_by_rank(every, before, lambda task: (threads[task] == MAIN_THREAD, threads[task], place[task]))
        assert order is not None  # the constraints agree with the order found above
        return Draft(tuple(stages), threads, tuple(order))

    def allows(self, stages: Sequence[int]) -> bool:
        """Return True if *stages* are within the limits and keep all dependencies."""
        return (
            all(0 <= stage < self.limits.max_in_flight for stage in stages)
            and all(stages[task] == 0 for task in self.by_caller)
            and all(stages[down] <= stages[up] + distance for up, down, distance in self.waits)
        )

    def draft_of(self, plan: PipelinePlan) -> Draft | None:
        """Draft of a plan for the same tasks; None if the plan exceeds the limits or a draft cannot express it."""
        if plan.deps or plan.cross_iter_deps or any(where.globally_ordered for where in plan.schedule.values()):
            return None
        groups = {group: number for number, group in enumerate(plan.thread_groups)}
        threads = [groups[plan.schedule[name].thread_group] for name in self.names]
        if any(thread != MAIN_THREAD and task not in self.movable for task, thread in enumerate(threads)):
            return None
        order = [self.names.index(name) for name in plan.order]
        return self.draft([plan.schedule[name].stage for name in self.names], threads, order)

    # ------------------------------------------------------------------ plans and costs of drafts

    def plan(self, draft: Draft, name: str = "auto") -> PipelinePlan:
        """Plan of a draft. Workers are named after the resources of their tasks."""
        groups = self._group_names(draft)
        pairs = []
        for task, stage, thread in zip(self.tasks, draft.stages, draft.threads, strict=True):
            stream = None
            if task.name not in self.limits.by_caller:
                stream = self.limits.streams.get(self.costs[task.name].resource)
            pairs.append((task, TaskSchedule(stage, stream, groups[thread])))
        return PipelinePlan(
            pairs,
            stale=[(d.upstream, d.downstream, d.distance) for d in self.stale],
            name=name,
            order=[self.names[task] for task in draft.order],
        )

    def seconds(self, draft: Draft) -> float:
        """Simulated seconds per iteration."""
        found = self._seconds.get(draft)
        if found is None:
            name = "stale" if self.stale else "auto"
            found = simulate(self.plan(draft, name), self.costs, self.machine).seconds_per_iteration
            self._seconds[draft] = found
        return found

    @property
    def simulated(self) -> int:
        """Number of drafts simulated so far."""
        return len(self._seconds)

    def held(self, task: int) -> float:
        """Seconds for which one run of *task* holds its thread."""
        return held(self.names[task], self.costs[self.names[task]], self.machine)

    def busiest_thread(self, threads: Sequence[int]) -> float:
        """Seconds per iteration for which tasks hold the busiest thread."""
        held = [0.0] * (max(threads) + 1)
        held[MAIN_THREAD] = self.machine.between_periods
        for task, thread in enumerate(threads):
            held[thread] += self.held(task)
        return max(held)

    def crowding(self, draft: Draft) -> int:
        """Number of computing threads in excess of the cores, which wait for each other's time slices."""
        if self.machine.device_streams:
            return 0
        computing = {
            thread
            for name, thread in zip(self.names, draft.threads, strict=True)
            if self.costs[name].resource == "compute" and self.costs[name].seconds
        }
        return max(0, len(computing) - math.floor(self.machine.cores))

    def _group_names(self, draft: Draft) -> dict[int, str]:
        names = {MAIN_THREAD: MAIN}
        for thread in range(1, draft.workers + 1):
            used = dict.fromkeys(
                self.costs[name].resource
                for name, where in zip(self.names, draft.threads, strict=True)
                if where == thread
            )
            wanted = "_".join(used)
            same = sum(name.rstrip("0123456789") == wanted for name in names.values())
            names[thread] = f"{wanted}{same + 1}" if same else wanted
        return names


def _renumbered(threads: Sequence[int]) -> tuple[int, ...]:
    numbers = {MAIN_THREAD: MAIN_THREAD}
    return tuple(numbers.setdefault(thread, len(numbers)) for thread in threads)
