"""Which way to train is chosen, of models whose layers take what the test says."""

from __future__ import annotations

import pytest

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.observe.timeline import microbatch_bar
from lightning_pipe.llm.choice.schedule_choice import (
    Calibration,
    Measurements,
    ScheduleCandidate,
    SchedulePrediction,
    fit_calibration_to_real_steps,
    list_candidates,
    microbatch_counts,
    predict_schedule,
    select_finalists,
    stage_durations,
)
from lightning_pipe.llm.measure.layer_bench import ModelPieceResults
from lightning_pipe.llm.measure.layer_profile import LayerWork
from lightning_pipe.llm.measure.links import Link
from lightning_pipe.llm.model.module_config import PPModuleConfig
from lightning_pipe.llm.schedules.simulation import KINDS, list_compute_actions
from lightning_pipe.llm.schedules.specs import SCHEDULES
from tests.llm.measure.test_rank_memory import STATES, footprint

CONFIG = PPModuleConfig(4, "layers", ("embedding",), ("head",))
NOTHING, LAYER = LayerWork(0.0, 0.0, 0.0, 0.0), LayerWork(1.0, 2.0, 1.0, 1.0)


def measured(
    counts: tuple[int, ...] = (4,),
    layers: tuple[LayerWork, ...] = (LAYER,) * 4,
    link: Link | None = None,
    hidden: int = 0,
) -> Measurements:
    """Each micro-batch takes the batch's share of the time."""

    def share(work: LayerWork, count: int) -> LayerWork:
        return LayerWork(*(4 * one / count for one in work))

    bare = footprint(output=hidden)
    return Measurements(
        {
            count: ModelPieceResults(NOTHING, NOTHING, tuple(share(one, count) for one in layers), NOTHING)
            for count in counts
        },
        {
            count: ModelPieceResults(bare, bare, (footprint(after_forward=100 // count, output=hidden),) * 4, bare)
            for count in counts
        },
        STATES,
        {} if link is None else {(0, 1): link},
    )


def candidate(name: str, m: int = 4, layers: tuple[int, ...] = (2, 2)) -> ScheduleCandidate:
    return ScheduleCandidate(SCHEDULES[name], len(layers) // 2, m, layers)


# ---------------------------------------------------------------------- numbers of micro-batches


@pytest.mark.parametrize(
    ("rows", "ranks", "expected"),
    [(16, 2, [2, 4, 8, 16]), (6, 2, [2, 3, 6]), (7, 2, [7]), (720, 2, [2, 4, 8, 12, 16]), (64, 4, [4, 8, 16, 32])],
)
def test_micro_batches_divide_the_batch_and_are_few(rows: int, ranks: int, expected: list[int]) -> None:
    assert microbatch_counts(rows, ranks) == expected


@pytest.mark.parametrize("rows", [1, 17])
def test_a_batch_that_no_number_divides_is_refused(rows: int) -> None:
    with pytest.raises(
        SetupError, match=rf"the batch has {rows} row\(s\), which no number of micro-batches from 2 to 16"
    ):
        microbatch_counts(rows, 2)


# ---------------------------------------------------------------------- candidates


def test_every_schedule_is_a_candidate_with_every_number_of_stages_that_the_layers_are_enough_for() -> None:
    found = list_candidates(CONFIG, 2, measured((4, 8)), by_memory=False)
    assert {one.spec.name for one in found} == set(SCHEDULES)
    assert {one.stages_per_rank for one in found if one.spec.name == "interleaved_1f1b"} == {1, 2}
    assert {one.num_microbatches for one in found} == {4, 8}
    assert len(found) == len(set(found))


def test_what_a_schedule_cannot_have_is_no_candidate() -> None:
    found = list_candidates(CONFIG, 2, measured((2,)), by_memory=False)
    assert "dualpipev" not in {one.spec.name for one in found}  # it needs four micro-batches
    allowed = list_candidates(CONFIG, 2, measured(), by_memory=False, allowed=lambda spec: spec.name == "gpipe")
    assert {one.spec.name for one in allowed} == {"gpipe"}


def test_layers_are_dealt_out_by_time_and_evenly_and_by_memory_where_that_is_scarce() -> None:
    slow = (LAYER, LAYER, LAYER, LayerWork(3.0, 6.0, 3.0, 3.0))
    known = measured(layers=slow)
    splits = {
        one.layers_per_stage for one in list_candidates(CONFIG, 2, known, by_memory=False) if one.spec.name == "1f1b"
    }
    assert splits == {(3, 1), (2, 2)}
    heavy = Measurements(known.work, known.footprints, ModelPieceResults(0, 10**6, (0,) * 4, 0))
    splits = {
        one.layers_per_stage for one in list_candidates(CONFIG, 2, heavy, by_memory=True) if one.spec.name == "1f1b"
    }
    assert splits == {(3, 1), (2, 2), (0, 4)}


# ---------------------------------------------------------------------- predictions


def test_stages_take_what_their_layers_take_beyond_a_stage_without_any() -> None:
    base, layer = LayerWork(0.5, 0.25, 0.125, 0.125), LayerWork(1.5, 2.25, 1.125, 1.125)
    found = stage_durations(ModelPieceResults(base, LayerWork(0.75, 0.5, 0.0, 0.5), (layer,) * 2, base), (1, 1))
    assert found[0, "forward"] == 0.5 + 0.25 + 1.0
    assert (found[1, "forward"], found[1, "input_backward"], found[1, "weight_backward"]) == (1.5, 1.125, 1.125)
    # The first stage's inputs are data.
    assert found[0, "input_backward"] == 0.0
    assert found[0, "weight_backward"] == 0.125 + (0.5 - 0.125) + (2.25 - 0.125)


def test_a_step_takes_what_the_actions_take_and_has_the_known_bubble() -> None:
    found = predict_schedule(candidate("1f1b"), 2, measured())
    assert found.seconds == pytest.approx((4 + 2 - 1) * 2 * 3.0)
    assert found.bubble == pytest.approx(1 / 5)


def test_messages_overhead_and_scales_make_it_longer() -> None:
    plain = predict_schedule(candidate("gpipe", 1), 2, measured((1,))).seconds
    known = measured((1,), link=Link(1.0, 0.5), hidden=4)
    calibration = Calibration({"forward": 2.0}, overhead=0.25, step_overhead=7.0)
    # Two forwards are as long again, a message of 3 s goes each way, and gaps not hidden behind one are two.
    forwards = 2 * known.work[1].layers[0].forward * 2
    assert predict_schedule(candidate("gpipe", 1), 2, known, calibration).seconds == pytest.approx(
        plain + forwards + 2 * 3.0 + 2 * 0.25 + 7.0
    )


def test_what_a_real_step_shows_is_found_again() -> None:
    """Steps made up of known scales, gaps and waits."""
    known, scales = measured(), {"forward": 1.5, "backward": 2.0, "input_backward": 1.25, "weight_backward": 3.0}
    runs = []
    for one in (candidate("1f1b"), candidate("interleaved_zero_bubble", layers=(1, 1, 1, 1))):
        durations = stage_durations(known.work[4], one.layers_per_stage)
        events = []
        for row in list_compute_actions(one.spec, 2, 4, one.stages_per_rank).values():
            now, noted = 0.0, []
            for action in row:
                kind = KINDS[action.computation_type]
                now += 0.5
                end = now + scales[kind] * durations[action.stage_index, kind]
                noted.append(microbatch_bar(action.stage_index, kind, action.microbatch_index or 0, now, end))
                now = end
            events.append(noted)
        longest = max(row[-1].end - row[0].start for row in events)
        runs.append((one, events, longest + 2.0))
    found = fit_calibration_to_real_steps(runs, 2, known)
    assert found.scales == pytest.approx(scales)
    assert found.step_overhead == pytest.approx(2.0)
    assert 0.4 < found.overhead < 0.5  # there is no gap before the first action


def test_finalists_are_the_fastest_and_of_no_schedule_too_many() -> None:
    names = ["gpipe"] * 4 + ["1f1b", "looped_bfs"]
    given = [SchedulePrediction(candidate(name), float(place), 0.0, ()) for place, name in enumerate(names)]
    assert [one.seconds for one in select_finalists(given, 3)] == [0.0, 1.0, 4.0]
    assert [one.seconds for one in select_finalists(given[::-1], 5)] == [0.0, 1.0, 4.0, 5.0]
