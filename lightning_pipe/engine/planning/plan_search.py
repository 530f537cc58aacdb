"""Sources of drafts for a search: modulo scheduling, small changes to a draft, and enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from lightning_pipe.engine.planning.costs import duration
from lightning_pipe.engine.planning.modulo_schedule import Claim, Loop, Wait, modulo_schedule
from lightning_pipe.engine.planning.plan_bound import iteration_edges
from lightning_pipe.engine.planning.plan_draft import MAIN_THREAD, Draft, PlanSpace

# Periods to try, as multiples of the shortest possible period for an assignment of threads.
_STRETCHES = (1.0, 1.003, 1.01, 1.02, 1.035, 1.05, 1.075, 1.1, 1.15, 1.2, 1.3, 1.4, 1.55, 1.7, 2.0, 2.5, 3.0, 4.0)
_MOST_THREADINGS = 48


def scheduled_drafts(space: PlanSpace, bound: float) -> Iterator[Draft]:
    """Drafts with the shortest period that can be scheduled, one for each promising assignment of tasks to threads.

    Args:
        space: drafts to choose from.
        bound: lower bound on the seconds per iteration.
    """
    for threads in threadings(space):
        loop = _loop(space, threads)
        least = max(bound, space.busiest_thread(threads))
        for stretch, by_slack in itertools.product(_STRETCHES, (False, True)):
            period = least * stretch
            starts = modulo_schedule(loop, period, space.limits.max_in_flight, by_slack=by_slack) if period else None
            draft = _from_starts(space, threads, starts, period) if starts else None
            if draft is not None:
                yield draft
                break


def threadings(space: PlanSpace) -> Iterator[tuple[int, ...]]:
    """Assignments of tasks to threads, ordered by the load of their busiest thread, lowest first.

    If only a few assignments are possible, all are included. Otherwise the assignments are: no worker, one worker per
    resource, one worker per task, one worker for all tasks, and all ways to distribute the tasks of one resource while
    each other resource has one worker.
    """
    limit = space.limits.max_workers
    every = list(itertools.islice(_partitions(space, space.movable, _on_main(space), limit), _MOST_THREADINGS + 1))
    if len(every) > _MOST_THREADINGS:
        by_resource = _on_main(space)
        resources = dict.fromkeys(space.costs[space.names[task]].resource for task in space.movable)
        for number, resource in enumerate(list(resources)[:limit], start=1):
            for task in space.movable:
                if space.costs[space.names[task]].resource == resource:
                    by_resource[task] = number
        one_each = _on_main(space)
        for number, task in enumerate(space.movable):
            one_each[task] = 1 + number % limit if limit else MAIN_THREAD
        some: list[Sequence[int]] = [_on_main(space), by_resource, one_each, [min(thread, 1) for thread in by_resource]]
        for resource in resources:
            same = [task for task in space.movable if space.costs[space.names[task]].resource == resource]
            rest = [MAIN_THREAD if task in same else thread for task, thread in enumerate(by_resource)]
            some += itertools.islice(_partitions(space, same, rest, limit), 4 * _MOST_THREADINGS)
        every = [tuple(threads) for threads in some]
    ranked = sorted(dict.fromkeys(every), key=lambda threads: (space.busiest_thread(threads), max(threads), threads))
    yield from ranked[:_MOST_THREADINGS]


def neighbours(space: PlanSpace, draft: Draft) -> Iterator[Draft]:
    """Drafts that differ from *draft* in the thread, stage or position of one task, and in changes this requires."""
    count = len(space.names)
    for task in space.movable:
        for thread in range(min(draft.workers + 1, space.limits.max_workers) + 1):
            if thread != draft.threads[task]:
                threads = [*draft.threads[:task], thread, *draft.threads[task + 1 :]]
                yield from _given(space.draft(draft.stages, threads, draft.order))
    for task, change in itertools.product(range(count), (1, -1)):
        stages = _shifted(space, draft.stages, task, change)
        if stages is not None:
            yield from _given(space.draft(stages, draft.threads, draft.order))
    for place, target in itertools.product(range(count), repeat=2):
        if place != target:
            order = list(draft.order)
            order.insert(target, order.pop(place))
            yield from _given(space.draft(draft.stages, draft.threads, order))


def simpler(space: PlanSpace, draft: Draft) -> Iterator[Draft]:
    """Drafts with one worker less, then with fewer batches in flight, then with one task in a lower stage."""
    for one, other in itertools.combinations(range(draft.workers + 1), 2):
        threads = [one if thread == other else thread for thread in draft.threads]
        yield from _given(space.draft(draft.stages, threads, draft.order))
    for highest in range(max(draft.stages)):
        stages = [min(stage, highest) for stage in draft.stages]
        yield from _given(space.draft(stages, draft.threads, draft.order))
    for task, stage in enumerate(draft.stages):
        if stage:
            stages = [*draft.stages[:task], stage - 1, *draft.stages[task + 1 :]]
            yield from _given(space.draft(stages, draft.threads, draft.order))


def every_draft(space: PlanSpace) -> Iterator[Draft]:
    """Every draft of *space*, each once."""
    count = len(space.names)
    heights = range(space.limits.max_in_flight)
    seen: set[Draft] = set()
    for stages in itertools.product(heights, repeat=count):
        if not space.allows(stages):
            continue
        for threads in _partitions(space, space.movable, _on_main(space), space.limits.max_workers):
            members = [[t for t in range(count) if threads[t] == thread] for thread in range(max(threads) + 1)]
            for sequences in itertools.product(*(itertools.permutations(tasks) for tasks in members)):
                draft = space.draft(stages, threads, list(itertools.chain(*sequences)))
                if draft is not None and draft not in seen:
                    seen.add(draft)
                    yield draft


# ---------------------------------------------------------------------- helpers


def _given(draft: Draft | None) -> Iterable[Draft]:
    return () if draft is None else (draft,)


def _on_main(space: PlanSpace) -> list[int]:
    return [MAIN_THREAD] * len(space.names)


def _partitions(
    space: PlanSpace, tasks: Sequence[int], threads: Sequence[int], limit: int
) -> Iterator[tuple[int, ...]]:
    """Copies of *threads* with *tasks* reassigned to the main thread or to new workers, in every possible way."""
    used = max(threads)

    def deal(position: int, workers: int, current: list[int]) -> Iterator[tuple[int, ...]]:
        if position == len(tasks):
            yield tuple(current)
            return
        for thread in (MAIN_THREAD, *range(used + 1, used + workers + 1), used + workers + 1):
            if thread <= limit:
                new = workers + (thread == used + workers + 1)
                current[tasks[position]] = thread
                yield from deal(position + 1, new, current)
        current[tasks[position]] = MAIN_THREAD

    yield from deal(0, 0, list(threads))


def _loop(space: PlanSpace, threads: Sequence[int]) -> Loop:
    """Loop to schedule, in which each task uses its thread and its resources."""
    index = {name: position for position, name in enumerate(space.names)}
    edges = iteration_edges(space.tasks, space.costs, space.limits.max_in_flight, space.machine, space.stale)
    waits = [
        Wait(index[str(edge.upstream)], index[str(edge.downstream)], edge.seconds, edge.distance)
        for edge in edges
        if edge.upstream in index and edge.downstream in index and edge.upstream != edge.downstream
    ]
    claims = []
    for task, name in enumerate(space.names):
        cost = space.costs[name]
        held = [Claim(threads[task], 0.0, space.held(task))]
        assert isinstance(cost.background, float | int)
        for resource, after, working in (
            (cost.resource, 0.0, cost.seconds),
            (cost.background_resource, cost.seconds, cost.background),
        ):
            # A schedule has no model of several lanes. The simulation takes them into account.
            if working and space.machine.lanes_of(resource) == 1:
                held.append(Claim(resource, after, working))
        claims.append([claim for claim in held if claim.seconds])
    seconds = [duration(name, cost) for name, cost in space.costs.items()]
    return Loop(seconds, claims, waits, MAIN_THREAD, space.machine.between_periods, space.by_caller)


def _from_starts(space: PlanSpace, threads: Sequence[int], starts: Sequence[float], period: float) -> Draft | None:
    """Draft that runs each task in the period in which it starts, in the order of the starts."""
    periods = [math.floor(start / period + 1e-9) for start in starts]
    stages = [space.limits.max_in_flight - 1 - number for number in periods]
    lowest = min(stages)
    within = [start - number * period for start, number in zip(starts, periods, strict=True)]
    order = sorted(range(len(starts)), key=lambda task: (within[task], task))
    return space.draft([stage - lowest for stage in stages], threads, order)


def _shifted(space: PlanSpace, stages: Sequence[int], task: int, change: int) -> list[int] | None:
    """Change the stage of *task*, and of the tasks that must move with it. Return None if that exceeds the limits."""
    moved = list(stages)
    moved[task] += change
    for _ in range(len(moved)):
        for up, down, distance in space.waits:
            if moved[down] > moved[up] + distance:
                if change > 0:
                    moved[up] = moved[down] - distance
                else:
                    moved[down] = moved[up] + distance
    return moved if space.allows(moved) else None
