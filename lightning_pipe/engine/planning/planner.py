"""Planner: variants of hand-written plans in which exposed tasks run further ahead, predicted by simulation.

It uses neither a clock nor random numbers, so equal costs give equal variants.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.planning.costs import NO_COST, Machine, TaskCost
from lightning_pipe.engine.planning.simulation import simulate
from lightning_pipe.engine.plans.order import topological_order
from lightning_pipe.engine.plans.plan import PipelinePlan
from lightning_pipe.engine.plans.schedule import TaskSchedule

# Number of plans whose variants are simulated, and of simulated iterations. Training pauses meanwhile.
_EXPANDED, _ITERATIONS = 6, 20


def propose_plan_variants(
    hand_written: Sequence[PipelinePlan],
    costs: Mapping[str, TaskCost],
    machine: Machine,
    *,
    movable: Collection[str],
    on_workers: Collection[str] = (),
    submitted_before: Collection[tuple[str, str]] = (),
    max_in_flight: int = 3,
    max_variants: int = 5,
) -> list[PipelinePlan]:
    """Exact variants of *hand_written* with the shortest predicted iterations, best first.

    The search repeatedly takes the best plan so far and moves one of its exposed tasks: one stage ahead, to another
    thread, or to another place in the period. Only tasks in *movable* move, and only those in *on_workers* change their
    thread. In every period the first task of a pair in *submitted_before* is submitted before the second, even if the
    two run for different iterations. Among equal predictions, plans with fewer batches in flight and fewer threads come
    first. Of plans that differ only in the order within a period, the fastest one counts.
    """

    def predict_seconds(plan: PipelinePlan, without: str | None = None) -> float:
        """Simulated seconds per iteration, to three digits: smaller differences have no meaning."""
        of_tasks = costs if without is None else {**costs, without: NO_COST}
        return float(f"{simulate(plan, of_tasks, machine, max_iterations=_ITERATIONS).seconds_per_iteration:.3g}")

    def placement(plan: PipelinePlan) -> tuple[Any, ...]:
        """Stage, thread and stream of each task, without the names of threads."""
        groups = {group: number for number, group in enumerate(plan.thread_group_names)}
        return tuple(
            (where.stage, groups[where.thread_group], machine.device_streams and where.stream)
            for where in plan.schedule.values()
        )

    ranks: dict[PipelinePlan, tuple[float, int, int]] = {}
    best: dict[tuple[Any, ...], PipelinePlan] = {}  # by placement
    seen: set[tuple[Any, ...]] = set()  # placements with their orders

    def add_candidate(plan: PipelinePlan) -> None:
        place = placement(plan)
        if plan.pipeline_depth > max_in_flight or (place, plan.order) in seen:
            return
        seen.add((place, plan.order))
        ranks[plan] = (predict_seconds(plan), plan.pipeline_depth, len(plan.thread_group_names))
        if place not in best or ranks[plan] < ranks[best[place]]:
            best[place] = plan

    for plan in hand_written:
        add_candidate(plan)
    expanded: set[PipelinePlan] = set()
    for _ in range(_EXPANDED):
        base = min((plan for plan in best.values() if plan not in expanded), key=ranks.__getitem__, default=None)
        if base is None:
            break
        expanded.add(base)
        for task in base.tasks:
            if task in movable and predict_seconds(base, without=task) < ranks[base][0]:
                for plan in _iter_plans_with_moved_task(base, task, movable, task in on_workers, submitted_before):
                    add_candidate(plan)
    variants = sorted((plan for plan in best.values() if plan not in hand_written), key=ranks.__getitem__)
    return [
        PipelinePlan.from_spec(replace(plan.spec, name=f"auto_{number}"), plan.tasks.values())
        for number, plan in enumerate(variants[:max_variants], start=1)
    ]


def _iter_plans_with_moved_task(
    plan: PipelinePlan,
    task: str,
    movable: Collection[str],
    any_thread: bool,
    submitted_before: Collection[tuple[str, str]],
) -> Iterator[PipelinePlan]:
    """Valid plans in which *task* has another stage, thread or place in the period."""
    where = plan.schedule[task]
    groups = dict.fromkeys((*plan.thread_group_names, task)) if any_thread else (where.thread_group,)
    other_tasks = [name for name in plan.order if name != task]
    for stage in (where.stage, where.stage + 1):
        for group in groups:
            schedule = {**plan.schedule, task: replace(where, stage=stage, thread_group=group)}
            _increase_upstream_stages(plan, schedule)
            if any(schedule[name] != plan.schedule[name] and name not in movable for name in schedule):
                continue
            before = [
                (dependency.upstream, dependency.downstream)
                for dependency in plan.dependencies
                if schedule[dependency.upstream].stage + dependency.distance == schedule[dependency.downstream].stage
            ]
            for place in range(len(other_tasks) + 1):
                rank = {name: index for index, name in enumerate([*other_tasks[:place], task, *other_tasks[place:]])}
                order = topological_order(plan.tasks, [*before, *submitted_before], rank.__getitem__)
                if order is None:
                    break
                spec = replace(plan.spec, schedule=schedule, order=tuple(order), pipeline_depth=None)
                try:
                    yield PipelinePlan.from_spec(spec, plan.tasks.values())
                except PlanError:  # such as collectives of one process group in two threads
                    break


def _increase_upstream_stages(plan: PipelinePlan, schedule: dict[str, TaskSchedule]) -> None:
    """Move tasks ahead in *schedule* as far as the tasks that depend on them need."""
    changed = True
    while changed:
        changed = False
        for dependency in plan.dependencies:
            up, stage = dependency.upstream, schedule[dependency.downstream].stage - dependency.distance
            if schedule[up].stage < stage:
                schedule[up], changed = replace(schedule[up], stage=stage), True
