"""The bubble of a pipeline: how long its ranks are idle, measured, and simulated from what was measured.

A step is as long as its longest rank took, from what it first did or waited for to the end of what it last did. Ranks
are not compared by their clocks, which differ between machines: it is taken that all begin a step at once.

Source of the textbook's share: GPipe (arXiv 1811.06965), section 2.3; 1F1B has the same (arXiv 2104.04473).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.engine.observe.timeline import Bar
from lightning_pipe.llm.schedules.named import ScheduleSpec
from lightning_pipe.llm.schedules.simulation import Actions, Kind, simulate
from lightning_pipe.llm.schedules.timed_stage import median_durations

__all__ = ["BubbleReport", "RankTimes", "StepBubble", "measure_step", "summarise", "textbook_bubble"]


class RankTimes(NamedTuple):
    """What became of one rank's time in a step; seconds, which add up to the step's.

    Attributes:
        busy: forwards, the loss, and backwards.
        wait_forward: waits for the stage before.
        wait_backward: waits for the stage after.
        other: between those: sends that are waited for, the schedule's own work.
        done: from the end of what it last did to the end of the step's longest rank.
    """

    busy: float
    wait_forward: float
    wait_backward: float
    other: float
    done: float

    @property
    def step(self) -> float:
        """All of it."""
        return self.busy + self.wait_forward + self.wait_backward + self.other + self.done


class StepBubble(NamedTuple):
    """One step of a pipeline, or the medians of several.

    Attributes:
        ranks: what became of the time of each rank of the pipeline, in order.
        measured: the share of all ranks' time in which they are not busy.
        step: seconds that the step took.
        simulated: the same share as ``measured``, of a step in which each forward and backward takes the median of what
            those of its stage took, and communication nothing; None for a schedule that lists no actions.
        bound: seconds that such a step takes.
    """

    ranks: tuple[RankTimes, ...]
    measured: float
    step: float
    simulated: float | None
    bound: float | None


@dataclass(frozen=True)
class BubbleReport:
    """The bubble of a schedule, measured and expected.

    Attributes:
        schedule: its name.
        num_microbatches: of a step.
        steps: how many were measured.
        medians: over those steps, each number by itself.
        textbook: (P - 1) / (m + P - 1) where the schedule is one for which this holds, of stages that take as long as
            each other; None for others.
    """

    schedule: str
    num_microbatches: int
    steps: int
    medians: StepBubble
    textbook: float | None


def measure_step(events: Sequence[Sequence[Bar]], actions: Actions) -> StepBubble:
    """What became of the time of a step's ranks, beside a simulation from the durations in it.

    Args:
        events: of one step, for each rank of the pipeline in order: what its stages noted, in their order. Only times
            of one rank are subtracted from each other.
        actions: what each rank computes, as ``simulation.actions_of`` gives it for this schedule; may be empty.

    Raises:
        InputError: a rank without events.
        SetupError: actions that the events do not cover.
    """
    silent = [rank for rank, row in enumerate(events) if not row]
    if silent or not events:
        raise InputError(
            f"rank(s) {silent} of a pipeline of {len(events)} noted nothing in this step; needed are the events of"
            " every rank: set record_events on every rank's runner before the step"
        )
    spans = [row[-1].end - row[0].start for row in events]
    step = max(spans)
    ranks = tuple(_times(row, span, step) for row, span in zip(events, spans, strict=True))
    measured = 1 - sum(one.busy for one in ranks) / (len(ranks) * step) if step else 0.0
    if not actions:
        return StepBubble(ranks, measured, step, None, None)
    durations = median_durations(event for row in events for event in row)
    timeline = simulate(actions, cast(Mapping[tuple[int, Kind], float], durations))  # and waits, which nobody looks up
    return StepBubble(ranks, measured, step, timeline.bubble_fraction, timeline.makespan)


def _times(events: Sequence[Bar], span: float, step: float) -> RankTimes:
    waits = {"wait_forward": 0.0, "wait_backward": 0.0}
    busy = 0.0
    for event in events:
        taken = event.end - event.start
        if event.kind in waits:
            waits[event.kind] += taken
        else:
            busy += taken
    return RankTimes(busy, **waits, other=span - busy - sum(waits.values()), done=step - span)


def textbook_bubble(spec: ScheduleSpec, pp_size: int, num_microbatches: int) -> float | None:
    """(P - 1) / (m + P - 1) for GPipe and 1F1B; None for every other schedule, where it does not hold."""
    if spec.name not in ("gpipe", "1f1b"):
        return None
    return (pp_size - 1) / (num_microbatches + pp_size - 1)


def summarise(spec: ScheduleSpec, num_microbatches: int, steps: Sequence[StepBubble]) -> BubbleReport:
    """The medians of some steps of one schedule.

    Args:
        spec: the schedule.
        num_microbatches: of a step.
        steps: at least one, of a pipeline of as many ranks each.

    Raises:
        InputError: no steps.
    """
    if not steps:
        raise InputError("no step was measured; needed is at least one: train more batches, or begin to measure sooner")

    def median(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    ranks, *others = zip(*steps, strict=True)
    of_ranks = (RankTimes(*map(statistics.median, zip(*same, strict=True))) for same in zip(*ranks, strict=True))
    medians = StepBubble(tuple(of_ranks), *map(median, others))  # type: ignore[arg-type]  # those that every step has
    textbook = textbook_bubble(spec, len(steps[0].ranks), num_microbatches)
    return BubbleReport(spec.name, num_microbatches, len(steps), medians, textbook)
