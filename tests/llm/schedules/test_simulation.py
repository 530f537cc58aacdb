"""Actions of schedules without processes, and their timelines."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import _Action

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.schedules.simulation import Kind, ScheduleTimeline, list_compute_actions, simulate_schedule
from lightning_pipe.llm.schedules.specs import SCHEDULES
from tests.llm.schedule_cases import backward_order, stage_of

EVEN: dict[Kind, float] = {"forward": 1, "backward": 2, "input_backward": 1, "weight_backward": 1}


def timeline_of(
    name: str, pp_size: int, m: int, stages_per_rank: int | None = None, **options: Any
) -> ScheduleTimeline:
    actions = list_compute_actions(SCHEDULES[name], pp_size, m, stages_per_rank)
    stages = {action.stage_index for row in actions.values() for action in row}
    durations = {(stage, kind): taken for stage in stages for kind, taken in EVEN.items()}
    return simulate_schedule(actions, durations, **options)


def parse(*rows: str) -> dict[int, list[_Action]]:
    return {rank: [a for text in row.split() if (a := _Action.from_str(text))] for rank, row in enumerate(rows)}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("pp_size", [1, 4])
def test_every_microbatch_goes_once_forward_and_once_backward_through_every_stage(name: str, pp_size: int) -> None:
    actions = list_compute_actions(SCHEDULES[name], pp_size, 8)
    stages = pp_size * (1 if SCHEDULES[name].placement == "single" else 2)
    done = [str(action) for row in actions.values() for action in row]
    assert len(done) == len(set(done))
    for stage in range(stages):
        for m in range(8):
            assert f"{stage}F{m}" in done
            assert (f"{stage}B{m}" in done) != (f"{stage}I{m}" in done and f"{stage}W{m}" in done)


def test_the_last_rank_of_1f1b_begins_with_the_first_microbatch() -> None:
    """The list of torch 2.13 has it begin with the second, and end with one that is not there."""
    assert list(map(str, list_compute_actions(SCHEDULES["1f1b"], 2, 3)[1])) == [
        "1F0",
        "1B0",
        "1F1",
        "1B1",
        "1F2",
        "1B2",
    ]
    assert list(map(str, list_compute_actions(SCHEDULES["1f1b"], 2, 3)[0])) == [
        "0F0",
        "0F1",
        "0B0",
        "0F2",
        "0B1",
        "0B2",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_added_in_ascending_order_but_for_looped_bfs(name: str) -> None:
    actions = list_compute_actions(SCHEDULES[name], 2, 4)
    stages = 2 if SCHEDULES[name].placement == "single" else 4
    expected = [3, 2, 1, 0] if name == "looped_bfs" else [0, 1, 2, 3]
    assert [backward_order(actions, stage) for stage in range(stages)] == [expected] * stages


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp_size", "m"), [(1, 1), (3, 5), (4, 16)])
def test_the_bubble_of_gpipe_and_1f1b_is_the_known_one(name: str, pp_size: int, m: int) -> None:
    timeline = timeline_of(name, pp_size, m)
    assert timeline.makespan == 3 * (m + pp_size - 1)
    assert timeline.bubble_fraction == pytest.approx((pp_size - 1) / (m + pp_size - 1))
    assert [timeline.busy(rank) for rank in range(pp_size)] == [3 * m] * pp_size
    assert [timeline.idle(rank) for rank in range(pp_size)] == [3 * (pp_size - 1)] * pp_size


@pytest.mark.parametrize("m", [4, 8])
def test_activations_of_all_microbatches_live_under_gpipe_and_of_p_minus_rank_under_1f1b(m: int) -> None:
    assert [timeline_of("gpipe", 4, m).peak_live_microbatches(rank) for rank in range(4)] == [m] * 4
    assert [timeline_of("1f1b", 4, m).peak_live_microbatches(rank) for rank in range(4)] == [4, 3, 2, 1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_begins_before_what_it_needs_has_ended(name: str) -> None:
    timeline = timeline_of(name, 2, 4)
    spans = [span for row in timeline.spans.values() for span in row]
    ends = {(span.stage, span.kind, span.microbatch): span.end for span in spans}
    last = max(map(stage_of, spans))
    for span, stage in zip(spans, map(stage_of, spans), strict=True):
        if span.kind == "forward" and stage > 0:
            assert span.start >= ends[stage - 1, "forward", span.microbatch]
        elif span.kind == "weight_backward":
            assert span.start >= ends[stage, "input_backward", span.microbatch]
        elif span.kind != "forward":
            assert span.start >= ends[stage, "forward", span.microbatch]
            if stage < last:
                after = [ends.get((stage + 1, kind, span.microbatch)) for kind in ("backward", "input_backward")]
                assert any(end is not None and span.start >= end for end in after)
    for row in timeline.spans.values():
        assert all(one.end <= other.start for one, other in pairwise(row))


def test_ranks_that_wait_for_each_other_are_an_error_that_names_them() -> None:
    durations: dict[tuple[int, Kind], float] = {(stage, kind): 1 for stage in (0, 1) for kind in EVEN}
    with pytest.raises(SetupError, match="rank 0 waits with 0B0, rank 1 waits with 1F1"):
        simulate_schedule(parse("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), durations)


def test_what_a_stage_gives_is_on_its_way_for_as_long_as_is_said() -> None:
    timeline = timeline_of("gpipe", 2, 1, messages={(0, 1): 3.0, (1, 0): 5.0})
    assert [(span.kind, span.start) for span in timeline.spans[1]] == [("forward", 1.0 + 3.0), ("backward", 5.0)]
    assert timeline.spans[0][1].start == 5.0 + EVEN["backward"] + 5.0


def test_a_rank_does_something_else_before_each_action_and_counts_as_idle() -> None:
    slowed = timeline_of("gpipe", 1, 3, overhead=0.5)
    assert slowed.makespan == timeline_of("gpipe", 1, 3).makespan + 6 * 0.5
    assert slowed.idle(0) == 6 * 0.5
