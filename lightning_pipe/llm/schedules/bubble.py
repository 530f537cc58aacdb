"""Bubble of a pipeline, the time in which its ranks are idle: measured, and simulated from measured durations.

A step takes the time of its longest rank, from its first work or wait to the end of its last work. Clocks of different
machines differ, so times of different ranks are never compared: all ranks are assumed to begin a step at the same time.

Source of the textbook formula: GPipe (arXiv 1811.06965), section 2.3; 1F1B has the same (arXiv 2104.04473).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

from lightning_pipe.engine.observe.timeline import Bar
from lightning_pipe.llm.schedules.simulation import Actions, Kind, simulate_schedule
from lightning_pipe.llm.schedules.specs import ScheduleSpec
from lightning_pipe.llm.schedules.timed_stage import compute_median_stage_durations


class RankTimes(NamedTuple):
    """Breakdown of one rank's time in a step; seconds that add up to the step's duration."""

    busy: float  # forwards, the loss, and backwards
    wait_forward: float  # waits for the preceding stage
    wait_backward: float  # waits for the following stage
    overhead: float  # time between those: waits for sends, and the schedule's own work
    wait_end: float  # time from the end of the rank's last work to the end of the step's longest rank

    @property
    def step_duration(self) -> float:
        """Duration of the step."""
        return self.busy + self.wait_forward + self.wait_backward + self.overhead + self.wait_end


class StepBubble(NamedTuple):
    """One step of a pipeline, or the medians of several."""

    ranks: tuple[RankTimes, ...]  # breakdown of the time of each rank of the pipeline, in order
    measured: float  # share of all ranks' time in which they are not busy
    step: float  # duration of the step in seconds
    # the same share in a simulated step, in which each forward and backward takes the median time of its stage and
    # communication takes no time; None for a schedule that lists no actions
    simulated: float | None
    simulated_step: float | None  # duration of the simulated step in seconds, or None


@dataclass(frozen=True)
class BubbleReport:
    """Bubble of a schedule, measured and expected."""

    schedule: str  # name of the schedule
    num_microbatches: int  # number of micro-batches in a step
    steps: int  # number of measured steps
    medians: StepBubble  # medians over those steps, taken separately for each number
    # (P - 1) / (m + P - 1), for schedules and even stages for which it holds; None for other schedules
    textbook: float | None


def compute_step_bubble(events: Sequence[Sequence[Bar]], actions: Actions) -> StepBubble:
    """Break down the time of a step's ranks, and simulate the step from its durations."""
    spans = [row[-1].end - row[0].start for row in events]
    step = max(spans)
    ranks = tuple(_break_down_rank_time(row, span, step) for row, span in zip(events, spans, strict=True))
    measured = 1 - sum(rank.busy for rank in ranks) / (len(ranks) * step) if step else 0.0
    if not actions:
        return StepBubble(ranks, measured, step, None, None)
    durations = compute_median_stage_durations(event for row in events for event in row)
    timeline = simulate_schedule(
        actions, cast(Mapping[tuple[int, Kind], float], durations)
    )  # has waits, too, which are unused
    return StepBubble(ranks, measured, step, timeline.bubble_fraction, timeline.makespan)


def _break_down_rank_time(events: Sequence[Bar], span: float, step: float) -> RankTimes:
    waits = {"wait_forward": 0.0, "wait_backward": 0.0}
    busy = 0.0
    for event in events:
        duration = event.end - event.start
        if event.kind in waits:
            waits[event.kind] += duration
        else:
            busy += duration
    return RankTimes(busy, **waits, overhead=span - busy - sum(waits.values()), wait_end=step - span)


def textbook_bubble(spec: ScheduleSpec, pp_size: int, num_microbatches: int) -> float | None:
    """Bubble (P - 1) / (m + P - 1) for GPipe and 1F1B; None for other schedules, where it does not hold."""
    if spec.name not in ("gpipe", "1f1b"):
        return None
    return (pp_size - 1) / (num_microbatches + pp_size - 1)


def build_bubble_report(spec: ScheduleSpec, num_microbatches: int, steps: Sequence[StepBubble]) -> BubbleReport:
    """Medians over at least one step of a schedule."""

    def median(values: Iterable[float | None]) -> float | None:
        present = [value for value in values if value is not None]
        return statistics.median(present) if present else None

    ranks, *measures = zip(*steps, strict=True)
    rank_medians = (RankTimes(*map(statistics.median, zip(*same, strict=True))) for same in zip(*ranks, strict=True))
    medians = StepBubble(tuple(rank_medians), *map(median, measures))  # type: ignore[arg-type]  # same in every step
    textbook = textbook_bubble(spec, len(steps[0].ranks), num_microbatches)
    return BubbleReport(spec.name, num_microbatches, len(steps), medians, textbook)
