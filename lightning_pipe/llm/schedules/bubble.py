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

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.engine.observe.timeline import Bar
from lightning_pipe.llm.schedules.named import ScheduleSpec
from lightning_pipe.llm.schedules.simulation import Actions, Kind, simulate
from lightning_pipe.llm.schedules.timed_stage import median_durations


class RankTimes(NamedTuple):
    """Breakdown of one rank's time in a step; seconds that add up to the step's duration.

    Attributes:
        busy: forwards, the loss, and backwards.
        wait_forward: waits for the preceding stage.
        wait_backward: waits for the following stage.
        other: time between those: waits for sends, and the schedule's own work.
        done: time from the end of the rank's last work to the end of the step's longest rank.
    """

    busy: float
    wait_forward: float
    wait_backward: float
    other: float
    done: float

    @property
    def step(self) -> float:
        """Duration of the step."""
        return self.busy + self.wait_forward + self.wait_backward + self.other + self.done


class StepBubble(NamedTuple):
    """One step of a pipeline, or the medians of several.

    Attributes:
        ranks: breakdown of the time of each rank of the pipeline, in order.
        measured: share of all ranks' time in which they are not busy.
        step: duration of the step in seconds.
        simulated: the same share in a simulated step, in which each forward and backward takes the median time of its
            stage and communication takes no time; None for a schedule that lists no actions.
        bound: duration of the simulated step in seconds, or None.
    """

    ranks: tuple[RankTimes, ...]
    measured: float
    step: float
    simulated: float | None
    bound: float | None


@dataclass(frozen=True)
class BubbleReport:
    """Bubble of a schedule, measured and expected.

    Attributes:
        schedule: name of the schedule.
        num_microbatches: number of micro-batches in a step.
        steps: number of measured steps.
        medians: medians over those steps, taken separately for each number.
        textbook: (P - 1) / (m + P - 1), for schedules and even stages for which it holds; None for other schedules.
    """

    schedule: str
    num_microbatches: int
    steps: int
    medians: StepBubble
    textbook: float | None


def measure_step(events: Sequence[Sequence[Bar]], actions: Actions) -> StepBubble:
    """Break down the time of a step's ranks, and simulate the step from its durations."""
    silent = [rank for rank, row in enumerate(events) if not row]
    if silent or not events:
        raise InputError(
            f"rank(s) {silent} of a pipeline of {len(events)} recorded nothing in this step; expected events of every"
            " rank. Set record_events on every rank's runner before the step"
        )
    spans = [row[-1].end - row[0].start for row in events]
    step = max(spans)
    ranks = tuple(_times(row, span, step) for row, span in zip(events, spans, strict=True))
    measured = 1 - sum(one.busy for one in ranks) / (len(ranks) * step) if step else 0.0
    if not actions:
        return StepBubble(ranks, measured, step, None, None)
    durations = median_durations(event for row in events for event in row)
    timeline = simulate(actions, cast(Mapping[tuple[int, Kind], float], durations))  # has waits, too, which are unused
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
    """Bubble (P - 1) / (m + P - 1) for GPipe and 1F1B; None for other schedules, where it does not hold."""
    if spec.name not in ("gpipe", "1f1b"):
        return None
    return (pp_size - 1) / (num_microbatches + pp_size - 1)


def summarise(spec: ScheduleSpec, num_microbatches: int, steps: Sequence[StepBubble]) -> BubbleReport:
    """Medians over steps of one schedule."""
    if not steps:
        raise InputError("no step was measured; expected at least one. Train more batches, or start measuring earlier")

    def median(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    ranks, *others = zip(*steps, strict=True)
    of_ranks = (RankTimes(*map(statistics.median, zip(*same, strict=True))) for same in zip(*ranks, strict=True))
    medians = StepBubble(tuple(of_ranks), *map(median, others))  # type: ignore[arg-type]  # same in every step
    textbook = textbook_bubble(spec, len(steps[0].ranks), num_microbatches)
    return BubbleReport(spec.name, num_microbatches, len(steps), medians, textbook)
