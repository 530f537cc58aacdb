"""Search for plans: the stage, thread and order of each task, given the costs of all tasks.

:mod:`.simulation` predicts the iteration time of a plan, :mod:`.plan_bound` gives a lower bound for all plans, and
:mod:`.plan_search` generates candidates. The search does not use a clock or random numbers, so ranks with the same
costs find the same plans.
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

# Relative difference up to which two predictions count as equal, and up to which a plan counts as reaching the bound.
_SAME = 1e-3
# Relative time that ranking adds for each computing thread in excess of the cores. The operating system distributes
# time slices and moves threads between cores, which is less even than the sharing in the simulation.
_CROWDED = 0.03
# Maximum number of simulations of a hill climb, and the number of drafts that it starts from.
_SEARCHED, _STARTS = 400, 3
# Maximum number of tasks for which drafts are enumerated, and maximum number of enumerated drafts.
_FEW_TASKS, _FEW = 5, 1500
# Number of drafts that reach the bound, after which the search ends.
_ENOUGH = 4


class PlanCandidate(NamedTuple):
    """Plan found by :func:`find_plans`.

    Args:
        plan: plan that was found.
        seconds: simulated seconds per iteration.
        why: comparison with the lower bound, for readers.
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
    """Search for the fastest plans within *limits*, best first. All plans are exact unless the limits allow staleness.

    Plans are ranked by their predicted iteration time, which is raised slightly for each computing thread in excess of
    the cores. Among equal plans, those with fewer workers come first, then those with fewer batches in flight.

    Args:
        tasks: tasks in the order in which a serial iteration runs them.
        costs: cost of every task, by name.
        limits: limits of the plans (default ``PlanLimits()``, which keeps all tasks on the main thread).
        machine: resources that the tasks share (default ``Machine()``).
        hand_written: plans for the same tasks that the search also starts from (default none). Plans outside the limits
            are ignored.
        keep: maximum number of plans to return (default 5).

    Raises:
        PlanError: the costs or limits do not fit the tasks, no plan keeps the limits, or *keep* is less than 1.
    """
    if keep < 1:
        raise PlanError(f"keep is {keep}, expected at least 1. Give the maximum number of plans to return.")
    limits, machine = limits or PlanLimits(), machine or Machine()
    exact = PlanSpace(tasks, costs, limits, machine)
    found = _Search(exact, hand_written).found()
    if limits.allow_stale and (abandoned := _stale_reads(exact)):
        found += _Search(PlanSpace(tasks, costs, limits, machine, abandoned), ()).found()
    best = min(one.weighed for one in found)
    # The sort is stable: among equal plans, exact ones come first, then simpler ones.
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
        distance = "no plan can be faster" if over <= _SAME else f"{over:.1%} above the lower bound"
        return PlanCandidate(
            self.space.plan(self.draft, name),
            self.seconds,
            f"{self.seconds * 1e3:.2f} ms by simulation, {distance}: {self.bound.reason}",
        )


class _Search:
    """Search for good drafts: modulo schedules first, then a hill climb, and enumeration if tasks are few.

    Args:
        space: drafts to choose from.
        hand_written: plans that the search also starts from.
    """

    def __init__(self, space: PlanSpace, hand_written: Sequence[PipelinePlan]) -> None:
        self.space = space
        self.bound = _bound(space)
        self.good_enough = self.bound.seconds * (1 + _SAME)
        self.drafts: dict[Draft, float] = {}  # weighed seconds per iteration
        count = len(space.names)
        self._add(space.draft([0] * count, [0] * count, range(count)))
        for plan in hand_written:
            self._add(space.draft_of(plan))

    def found(self) -> list[_FoundPlan]:
        """Best draft for each combination of crowding, workers and batches in flight, best first."""
        good = 0
        for draft in scheduled_drafts(self.space, self.bound.seconds):
            good += self._add(draft) <= self.good_enough
            if good == _ENOUGH:
                break
        if not self.drafts:
            limits = self.space.limits
            pairs = "; ".join(f"{first} before {then}" for first, then in limits.submitted_before)
            raise PlanError(
                f"no plan keeps the limits: with at most {limits.max_in_flight} batches in flight, no order of the"
                f" tasks keeps both their dependencies and submitted_before ({pairs}). Remove pairs from"
                " submitted_before."
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
        """Hill climb from each of the best drafts, to a better neighbour until none exists."""
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
        """Replace the best draft with simpler ones until every simpler one is slower."""
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
        """Sort key: weighed seconds. Drafts that equal the best one are sorted by simplicity."""
        over = _unless_best(self.drafts[draft], self._best())
        return over, draft.workers, max(draft.stages), sum(draft.stages), draft


def _weighed(space: PlanSpace, draft: Draft) -> float:
    """Seconds per iteration, raised for each computing thread in excess of the cores."""
    return space.seconds(draft) * (1 + _CROWDED * space.crowding(draft))


def _unless_best(seconds: float, best: float) -> float:
    """Sort key of *seconds*; 0 if they equal the best time."""
    return 0.0 if seconds <= best * (1 + _SAME) else seconds


def _bound(space: PlanSpace) -> Bound:
    limits = space.limits
    return lower_bound(
        space.tasks, space.costs, limits.max_in_flight, space.machine, space.stale, on_main=space.on_main
    )


def _stale_reads(space: PlanSpace) -> tuple[Dependency, ...]:
    """Reads of state to delay by one step. Each of them is on the slowest cycle, and delaying it lowers the bound."""
    abandoned: tuple[Dependency, ...] = ()
    while True:
        now = PlanSpace(space.tasks, space.costs, space.limits, space.machine, abandoned)
        bound = _bound(now)
        required = required_dependencies(space.tasks, abandoned)
        reads = [d for d in required if (d.upstream, d.downstream, d.distance) in bound.cycle and _is_read(space, d)]
        if not reads:
            return abandoned
        more = (*abandoned, reads[0])
        after = _bound(PlanSpace(space.tasks, space.costs, space.limits, space.machine, more))
        if after.seconds >= bound.seconds:
            return abandoned
        abandoned = more


def _is_read(space: PlanSpace, dependency: Dependency) -> bool:
    """Return True if *dependency* only orders a read after a write of the previous iteration, not two writes."""
    tasks = {task.name: task for task in space.tasks}
    up, down = tasks[dependency.upstream], tasks[dependency.downstream]

    def states(names: Iterable[str]) -> set[str]:
        return {name for name in names if isinstance(name, State)}

    return (
        dependency.distance == 1
        and bool(states(up.writes) & states(down.reads))
        and not (states((*up.reads, *up.writes)) & states(down.writes))
    )
