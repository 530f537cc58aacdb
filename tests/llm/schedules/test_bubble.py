"""The bubble of a step, from events that are made up: no processes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from lightning_pipe.engine.observe.timeline import Bar, microbatch_bar
from lightning_pipe.llm.schedules.bubble import (
    RankTimes,
    StepBubble,
    build_bubble_report,
    compute_step_bubble,
    textbook_bubble,
)
from lightning_pipe.llm.schedules.simulation import Kind, ScheduleTimeline, list_compute_actions, simulate_schedule
from lightning_pipe.llm.schedules.specs import SCHEDULES

MS = 1e-3


def durations_of(stages: int, *, slowest: int = 0) -> dict[tuple[int, Kind], float]:
    """In milliseconds; stage *slowest* takes twice as long."""
    each: Mapping[Kind, float] = {"forward": 10, "backward": 20, "input_backward": 12, "weight_backward": 8}
    return {
        (stage, kind): taken * (2 if stage == slowest else 1) for stage in range(stages) for kind, taken in each.items()
    }


def events_of(timeline: ScheduleTimeline) -> list[list[Bar]]:
    """What ranks note that do what a timeline says, each by a clock that no other rank has."""
    found = []
    for rank, spans in timeline.spans.items():
        clock = 1e5 * (3 - rank)
        events: list[Bar] = []
        end = 0.0
        for span in spans:
            times = [clock + time * MS for time in (end, span.start, span.end)]
            if span.start > end:
                wait = "wait_forward" if span.kind == "forward" else "wait_backward"
                events.append(span._replace(kind=wait, start=times[0], end=times[1]))
            events.append(span._replace(start=times[1], end=times[2]))
            end = span.end
        found.append(events)
    return found


@pytest.mark.parametrize(("name", "pp_size"), [("gpipe", 1), ("interleaved_1f1b", 4), ("dualpipev", 2)])
def test_ranks_that_keep_to_a_timeline_have_its_bubble_whatever_their_clocks_say(name: str, pp_size: int) -> None:
    actions = list_compute_actions(SCHEDULES[name], pp_size, 8)
    stages = {action.stage_index for row in actions.values() for action in row}
    timeline = simulate_schedule(actions, durations_of(len(stages)))
    step = compute_step_bubble(events_of(timeline), actions)
    assert step.measured == pytest.approx(timeline.bubble_fraction)
    assert step.step == pytest.approx(timeline.makespan / 1e3)
    assert step.simulated == pytest.approx(step.measured)
    assert step.simulated_step == pytest.approx(step.step)
    for rank, times in enumerate(step.ranks):
        assert times.busy == pytest.approx(timeline.busy(rank) / 1e3)
        assert times.overhead == pytest.approx(0.0, abs=1e-9)
        assert times.step_duration == pytest.approx(step.step)


def test_each_part_of_a_ranks_time_is_found_under_its_name() -> None:
    def event(kind: str, start: int, end: int) -> Bar:
        return microbatch_bar(1, kind, 0, start * MS, end * MS)

    rank = [
        event("wait_forward", 100, 107),
        event("forward", 107, 110),
        event("wait_backward", 111, 113),
        event("input_backward", 113, 117),
        event("weight_backward", 119, 124),
    ]
    longest = [microbatch_bar(0, "forward", 0, 0, 30 * MS)]
    step = compute_step_bubble([longest, rank], {})
    assert step.ranks[0] == RankTimes(0.03, 0.0, 0.0, overhead=0.0, wait_end=0.0)
    expected = RankTimes(busy=0.012, wait_forward=0.007, wait_backward=0.002, overhead=0.003, wait_end=0.006)
    assert step.ranks[1] == pytest.approx(expected)
    assert step.step == pytest.approx(0.030)
    assert step.measured == pytest.approx(1 - 42 / 60)
    assert (step.simulated, step.simulated_step) == (None, None)


def test_the_textbooks_bubble_is_that_of_gpipe_and_1f1b_alone() -> None:
    found = {name: textbook_bubble(spec, 4, 8) for name, spec in SCHEDULES.items()}
    assert {name for name, share in found.items() if share is not None} == {"gpipe", "1f1b"}
    assert found["gpipe"] == found["1f1b"] == pytest.approx(3 / 11)


def test_a_summary_holds_the_median_of_each_number_over_the_steps() -> None:
    def step(scale: float, simulated: float | None) -> StepBubble:
        return StepBubble((RankTimes(scale, 2, 3, 4, 5), RankTimes(6, 7, 8, 9, scale)), scale, 10, simulated, simulated)

    report = build_bubble_report(SCHEDULES["1f1b"], 4, [step(1, 0.1), step(30, 0.3), step(2, 0.2)])
    assert (report.schedule, report.num_microbatches, report.steps) == ("1f1b", 4, 3)
    assert report.medians == StepBubble((RankTimes(2, 2, 3, 4, 5), RankTimes(6, 7, 8, 9, 2)), 2, 10, 0.2, 0.2)
    assert report.textbook == pytest.approx(1 / 5)
    bare = build_bubble_report(SCHEDULES["dualpipev"], 4, [step(1, None)])
    assert (bare.medians.simulated, bare.medians.simulated_step, bare.textbook) == (None, None, None)
