"""Finds plans for tasks whose costs are known: how far ahead each runs, in which thread, and in which order.

The simulator says what a plan takes (:mod:`.simulation`), :mod:`.plan_bound` what none can undercut, and
:mod:`.plan_search` where to look. Nothing here depends on a clock or on chance: ranks with the same costs find the same
plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.planning.costs import Machine, TaskCost
from lightning_pipe.engine.planning.plan_bound import Bound, lower_bound
from lightning_pipe.engine.planning.plan_draft import Draft, PlanSpace
from lightning_pipe.engine.planning.plan_limits import PlanLimits
from lightning_pipe.engine.planning.plan_search import every_draft, neighbours, scheduled_drafts, simpler
from lightning_pipe.engine.plans.dependencies import Dependency, required_dependencies
from lightning_pipe.engine.plans.plan import PipelinePlan
from lightning_pipe.engine.plans.task import PipelineTask, State

# Two predictions are the same up to this part of them, and a plan that is this close to the bound is good enough.
_SAME = 1e-3
# What each thread that computes beyond the cores there are is taken to add to a plan's time, to rank it by: the system
# shares cores out in slices and moves threads between them, less evenly than the simulation.
_CROWDED = 0.03
# Simulations that a climb may cost, and drafts that it starts from; tasks and drafts that are few enough to try all.
_SEARCHED, _STARTS = 400, 3
_FEW_TASKS, _FEW = 5, 1500
# Drafts that reach the bound, after which no more are looked for.
_ENOUGH = 4


class PlanCandidate(NamedTuple):
    """A plan that was found.

    Args:
        plan: the plan.
        seconds: per iteration, by simulation.
        why: how it compares with what is possible.
    """

    plan: PipelinePlan
    seconds: float
    why: str


def find_plans(
    tasks: Sequence[PipelineTask],
    costs: Mapping[str, TaskCost],
    limits: PlanLimits | None = None,
    machine: Machine | None = None,
    *,
    hand_written: Sequence[PipelinePlan] = (),
    keep: int = 5,
) -> list[PlanCandidate]:
    """The best plans within *limits*, best first. Exact ones, unless the limits allow staleness.

    Of plans that are predicted to take about the same time, the better one has no more threads that compute than there
    are cores; of those that take the same, the better one has fewer workers, then fewer batches in flight.

    Args:
        tasks: in the order in which a serial iteration runs them.
        costs: of every task, by name.
        limits: what a plan may do; by default everything stays on the main thread.
        machine: what the tasks share.
        hand_written: plans for the same tasks to start from as well, as far as they are within the limits.
        keep: how many to return at most.

    Raises:
        PlanError: costs or limits that do not fit the tasks, limits that no plan keeps, or nothing to keep.
    """
    if keep < 1:
        raise PlanError(f"keep is {keep}; keep 1 plan or more")
    limits, machine = limits or PlanLimits(), machine or Machine()
    exact = PlanSpace(tasks, costs, limits, machine)
    found = _Search(exact, hand_written).found()
    if limits.allow_stale and (given_up := _stale_reads(exact)):
        found += _Search(PlanSpace(tasks, costs, limits, machine, given_up), ()).found()
    best = min(one.weighed for one in found)
    # Stable: of equals the exact one, and then the simplest.
    found.sort(key=lambda one: _unless_best(one.weighed, best))
    return [one.candidate(f"auto_{number}") for number, one in enumerate(found[:keep], start=1)]


class _FoundPlan(NamedTuple):
    space: PlanSpace
    draft: Draft
    bound: Bound

    @property
    def seconds(self) -> float:
        return self.space.seconds(self.draft)

    @property
    def weighed(self) -> float:
        return _weighed(self.space, self.draft)

    def candidate(self, name: str) -> PlanCandidate:
        if self.space.stale:
            name = name.replace("auto", "auto_stale")
        over = self.seconds / self.bound.seconds - 1 if self.bound.seconds else 0.0
        distance = "no plan can be faster" if over <= _SAME else f"{over:.1%} more than no plan can be faster than"
        return PlanCandidate(
            self.space.plan(self.draft, name),
            self.seconds,
            f"{self.seconds * 1e3:.2f} ms by simulation, {distance}: {self.bound.reason}",
        )


class _Search:
    """A search for good drafts, from schedules computed for shorter and shorter periods to small changes.

    Args:
        space: the drafts.
        hand_written: plans to start from as well.
    """

    def __init__(self, space: PlanSpace, hand_written: Sequence[PipelinePlan]) -> None:
        self.space = space
        self.bound = _bound(space)
        self.good_enough = self.bound.seconds * (1 + _SAME)
        self.drafts: dict[Draft, float] = {}  # what each takes, weighed
        count = len(space.names)
        self._add(space.draft([0] * count, [0] * count, range(count)))
        for plan in hand_written:
            self._add(space.draft_of(plan))

    def found(self) -> list[_FoundPlan]:
        """For each number of workers and of batches in flight the best draft, best first."""
        good = 0
        for draft in scheduled_drafts(self.space, self.bound.seconds):
            good += self._add(draft) <= self.good_enough
            if good == _ENOUGH:
                break
        if not self.drafts:
            limits = self.space.limits
            pairs = "; ".join(f"{first} before {then}" for first, then in limits.submitted_before)
            raise PlanError(
                f"no plan keeps the limits: with at most {limits.max_in_flight} batches in flight no order of"
                f" the tasks that their dependencies allow has submitted_before ({pairs}); take pairs out"
            )
        if self._best() > self.good_enough:
            self._climb()
        if self._best() > self.good_enough and len(self.space.names) <= _FEW_TASKS:
            for draft in itertools.islice(every_draft(self.space), _FEW):
                self._add(draft)
        self._simplify()
        kinds: dict[tuple[int, ...], Draft] = {}
        for draft in sorted(self.drafts, key=self._rank):
            kinds.setdefault((self.space.crowding(draft), draft.workers, max(draft.stages)), draft)
        return [_FoundPlan(self.space, draft, self.bound) for draft in sorted(kinds.values(), key=self._rank)]

    def _climb(self) -> None:
        """From the best drafts, to a better neighbour as long as there is one."""
        last = self.space.simulated + _SEARCHED
        for start in sorted(self.drafts, key=self._rank)[:_STARTS]:
            here = start
            while self.space.simulated < last:
                better = next(
                    (
                        other
                        for other in neighbours(self.space, here)
                        if self._add(other) < self.drafts[here] * (1 - _SAME / 10) or self.space.simulated >= last
                    ),
                    None,
                )
                if better is None or self.drafts[better] >= self.drafts[here]:
                    break
                here = better
            if self._best() <= self.good_enough:
                return

    def _simplify(self) -> None:
        """From the best draft, to a simpler one as long as that is not slower."""
        here = min(self.drafts, key=self._rank)
        limit = self._best() * (1 + _SAME)
        while simple := next((other for other in simpler(self.space, here) if self._add(other) <= limit), None):
            here = simple

    def _add(self, draft: Draft | None) -> float:
        if draft is None:
            return math.inf
        self.drafts[draft] = _weighed(self.space, draft)
        return self.drafts[draft]

    def _best(self) -> float:
        return min(self.drafts.values())

    def _rank(self, draft: Draft) -> tuple[float, int, int, int, Draft]:
        """By weighed seconds, but of those that are as good as the best, the simplest first."""
        over = _unless_best(self.drafts[draft], self._best())
        return over, draft.workers, max(draft.stages), sum(draft.stages), draft


def _weighed(space: PlanSpace, draft: Draft) -> float:
    """What a draft takes, with what threads cost that compete for cores."""
    return space.seconds(draft) * (1 + _CROWDED * space.crowding(draft))


def _unless_best(seconds: float, best: float) -> float:
    """*seconds* to sort by, 0 where they are the same as the best."""
    return 0.0 if seconds <= best * (1 + _SAME) else seconds


def _bound(space: PlanSpace) -> Bound:
    limits = space.limits
    return lower_bound(
        space.tasks, space.costs, limits.max_in_flight, space.machine, space.stale, on_main=space.on_main
    )


def _stale_reads(space: PlanSpace) -> tuple[Dependency, ...]:
    """Reads that, each a step behind, lower the bound: along the slowest cycle, one after the other."""
    given_up: tuple[Dependency, ...] = ()
    while True:
        now = PlanSpace(space.tasks, space.costs, space.limits, space.machine, given_up)
        bound = _bound(now)
        required = required_dependencies(space.tasks, given_up)
        reads = [d for d in required if (d.upstream, d.downstream, d.distance) in bound.cycle and _is_read(space, d)]
        if not reads:
            return given_up
        more = (*given_up, reads[0])
        after = _bound(PlanSpace(space.tasks, space.costs, space.limits, space.machine, more))
        if after.seconds >= bound.seconds:
            return given_up
        given_up = more


def _is_read(space: PlanSpace, dependency: Dependency) -> bool:
    """Whether it only keeps a read after what the iteration before wrote: the order of two writes is never given up."""
    tasks = {task.name: task for task in space.tasks}
    up, down = tasks[dependency.upstream], tasks[dependency.downstream]

    def states(names: Iterable[str]) -> set[str]:
        return {name for name in names if isinstance(name, State)}

    return (
        dependency.distance == 1
        and bool(states(up.writes) & states(down.reads))
        and not (states((*up.reads, *up.writes)) & states(down.writes))
    )
