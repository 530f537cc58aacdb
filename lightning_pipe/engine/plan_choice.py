"""Lets the found plans and the hand-written ones run against each other, and keeps the winner."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_pipe.engine.errors import PlanError
from lightning_pipe.engine.plan import PipelinePlan
from lightning_pipe.engine.planner import Candidate
from lightning_pipe.engine.render import _table, _text

# How often at most a plan may be taken to be faster than the hand-written ones when it is not.
_CHANCE = 0.05

Measure = Callable[[Sequence[PipelinePlan]], Sequence[Sequence[float]]]


@dataclass(frozen=True)
class Measured:
    """One plan's part in a comparison.

    Args:
        plan: the plan.
        seconds: per iteration, one value a round; the values of one round belong together.
        predicted: seconds per iteration by simulation, for a plan that was found.
        wins: rounds in which it was faster than the best hand-written plan.
    """

    plan: PipelinePlan
    seconds: tuple[float, ...]
    predicted: float | None
    wins: int

    @property
    def median(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Choice:
    """The winner of a comparison, and why; printed as a table.

    Attributes:
        plan: the winner.
        reason: why, in a sentence or two.
        measured: every plan, in the order of the medians.
    """

    plan: PipelinePlan
    reason: str
    measured: tuple[Measured, ...]

    def __str__(self) -> str:
        table = _table()
        for column in ("plan", "predicted ms", "measured ms", "rounds won", "in flight", "threads", ""):
            table.add_column(column, justify="left" if column in ("plan", "") else "right")
        for entry in self.measured:
            predicted = "" if entry.predicted is None else f"{entry.predicted * 1e3:.2f}"
            won = "" if entry.predicted is None else f"{entry.wins} of {len(entry.seconds)}"
            table.add_row(
                entry.plan.name,
                predicted,
                f"{entry.median * 1e3:.2f}",
                won,
                str(entry.plan.pipeline_depth),
                str(len(entry.plan.thread_groups)),
                "chosen" if entry.plan is self.plan else "",
            )
        return _text(120, "plans measured in turns, median time per iteration", table, self.reason)


def choose_plan(candidates: Sequence[Candidate], measure: Measure, hand_written: Sequence[PipelinePlan]) -> Choice:
    """Measure plans in turns and keep the fastest, of equals a hand-written one.

    A candidate has to be faster than the hand-written plan with the lowest median in so many of the rounds that plans
    of equal speed would come to that once in twenty choices at most (a sign test of the paired rounds, shared among the
    candidates), and its median has to be lower. With few rounds nothing can pass that test: five candidates need seven
    rounds, one needs five.

    Args:
        candidates: what :func:`~lightning_pipe.engine.planner.find_plans` found. One that is the same as a hand-written
            plan is left out.
        measure: runs plans in interleaved rounds; returns for each, in the order given, its seconds per iteration in
            every round. Called once, on every rank with the same plans; what it returns must be the same on all ranks.
        hand_written: the plans to beat.

    Raises:
        PlanError: no hand-written plan, or measurements that do not fit the plans.
    """
    if not hand_written:
        raise PlanError("there is no hand-written plan to compare with; give at least the serial one")
    known = [_what_runs(plan) for plan in hand_written]
    candidates = [candidate for candidate in candidates if _what_runs(candidate.plan) not in known]
    plans = [*hand_written, *(candidate.plan for candidate in candidates)]
    times = [tuple(seconds) for seconds in measure(plans)]
    rounds = len(times[0]) if times else 0
    if not rounds or len(times) != len(plans) or any(len(seconds) != rounds for seconds in times):
        raise PlanError(
            f"{len(plans)} plans were given to measure, and the measurements have the lengths"
            f" {[len(seconds) for seconds in times]}; return one list a plan, all with the same number of rounds"
        )
    if bad := [value for seconds in times for value in seconds if not (math.isfinite(value) and value >= 0)]:
        raise PlanError(f"a measurement is {bad[0]!r}; return seconds per iteration, finite and from 0")
    best = min(range(len(hand_written)), key=lambda index: statistics.median(times[index]))
    predicted = [None] * len(hand_written) + [candidate.seconds for candidate in candidates]
    measured = [
        Measured(plan, seconds, expected, sum(own < other for own, other in zip(seconds, times[best], strict=True)))
        for plan, seconds, expected in zip(plans, times, predicted, strict=True)
    ]
    to_beat = measured[best]
    needed = _wins_needed(rounds, len(candidates))
    faster = [
        entry for entry in measured[len(hand_written) :] if entry.wins >= needed and entry.median < to_beat.median
    ]
    winner = min(faster, key=lambda entry: entry.median, default=to_beat)
    why = {candidate.plan.name: candidate.why for candidate in candidates}
    if winner is to_beat:
        reason = f"{to_beat.plan.name} is kept: no other plan was faster in {_of_rounds(needed, rounds)}."
        reason += " The best found by simulation:" if candidates else " No other plan was found."
        reason += f" {candidates[0].why}." if candidates else ""
    else:
        gain = 1 - winner.median / to_beat.median
        reason = (
            f"{winner.plan.name} is {gain:.1%} faster than {to_beat.plan.name}, the best hand-written plan, and was"
        )
        reason += f" faster in {winner.wins} of {rounds} rounds. It takes {why[winner.plan.name]}."
    return Choice(winner.plan, reason, tuple(sorted(measured, key=lambda entry: entry.median)))


def _what_runs(plan: PipelinePlan) -> list[tuple[str, str]]:
    return [(what, text) for what, text in plan.description() if what not in ("name", "pipeline_depth")]


def _of_rounds(needed: int, rounds: int) -> str:
    return f"{needed} of {rounds} rounds" if needed <= rounds else f"enough rounds, of which there were {rounds} only"


def _wins_needed(rounds: int, candidates: int) -> int:
    """Least wins that plans of equal speed would reach, any one of them, with less than :data:`_CHANCE`."""
    allowed = _CHANCE / max(1, candidates) * 2**rounds
    ways = 0
    for wins in range(rounds, -1, -1):
        ways += math.comb(rounds, wins)
        if ways > allowed:
            return wins + 1
    return 0
