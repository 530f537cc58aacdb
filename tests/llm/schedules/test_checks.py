"""What a schedule needs is asked before it can hang or be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    _Action,
)

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.schedules.checks import (
    check_microbatches,
    check_schedule_sharding,
    choose_supported_schedule,
    describe_schedule_fallback,
    splits_backward,
)
from lightning_pipe.llm.schedules.simulation import list_compute_actions
from lightning_pipe.llm.schedules.specs import SCHEDULES, resolve_schedule_spec
from tests.llm.schedule_cases import PlacedSchedule, UnbalancedSchedule, VOfMulti

SPLIT = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev")


def refusal(name: str, num_microbatches: int, pp_size: int, stages_per_rank: int | None) -> str:
    try:
        check_microbatches(SCHEDULES[name], num_microbatches, pp_size, stages_per_rank)
    except SetupError as error:
        return str(error)
    return ""


def needed(name: str, m: int, pp_size: int) -> bool:
    if name == "1f1b":
        return m >= pp_size
    if name == "dualpipev":
        return m >= 2 * pp_size
    return not name.startswith("interleaved") or m % max(1, m // pp_size) == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_just_those_numbers_of_microbatches_are_taken_that_pytorch_can_run(name: str) -> None:
    loop = SCHEDULES[name].placement == "loop"
    for stages_per_rank in (1, 3) if loop else (None,):
        for pp_size in (1, 2, 4):
            for m in range(1, 14):
                # PyTorch's own refusal, of what these rules let pass, has other words.
                words = "" if needed(name, m, pp_size) else f"num_microbatches is {m}; schedule {name} needs"
                assert refusal(name, m, pp_size, stages_per_rank)[: len(words) or None] == words


def test_a_refusal_names_numbers_that_are_taken() -> None:
    with pytest.raises(SetupError, match=r"needs a multiple of its rounds, 2, .* Use 8 or 10"):
        check_microbatches(SCHEDULES["interleaved_1f1b"], 9, 4)
    for m in (8, 10):
        check_microbatches(SCHEDULES["interleaved_1f1b"], m, 4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_number_that_a_schedule_does_not_take_runs_under_one_with_the_same_stages(name: str) -> None:
    spec = SCHEDULES[name]
    for m in range(1, 14):
        used = choose_supported_schedule(spec, m, 4)
        assert used.placement == spec.placement
        assert (used is spec) == needed(name, m, 4)
        check_microbatches(used, m, 4)


class Refuses(ScheduleGPipe):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("not on a Sunday")


class ListsNothing(PipelineScheduleMulti):
    pass


class Reversed(ScheduleInterleaved1F1B):
    """Two ranks of one stage, whose last runs its forwards from the last micro-batch to the first."""

    def _calculate_single_rank_operations(self, rank: int) -> list[_Action | None]:
        order = range(self._n_microbatches - 1, -1, -1)
        return [_Action.from_str(f"{rank}{kind}{m}") for kind in "FB" for m in order]


class OwnZeroBubble(ScheduleInterleavedZeroBubble):
    pass


@pytest.mark.parametrize(
    ("given", "stages_per_rank", "message"),
    [
        (
            Refuses,
            None,
            "schedule Refuses cannot be built with 4 micro-batches and 2 stages: RuntimeError: not on",
        ),
        (ListsNothing, None, "schedule ListsNothing lists no actions"),
        (
            UnbalancedSchedule,
            None,
            "schedule UnbalancedSchedule has its stages 0 on rank 0, 1 on rank 0, 2 on rank 0, 3 on rank 1; expected,"
            " for rank r of 2, stage r; or r, r",
        ),
        (VOfMulti, None, "schedule VOfMulti has neighboring stages on one rank, .* _PipelineScheduleRuntime"),
        (PlacedSchedule, 4, "stages_per_rank is 4; schedule PlacedSchedule needs two stages"),
        (Reversed, 1, r"forwards of the last stage, 1, in the order \[3, 2, 1, 0\]"),
    ],
)
def test_what_a_class_of_the_users_own_cannot_do_is_an_error(
    given: type, stages_per_rank: int | None, message: str
) -> None:
    with pytest.raises(SetupError, match=message):
        check_microbatches(resolve_schedule_spec(given), 4, 2, stages_per_rank)


def write(path: Path, rows: list[list[str]]) -> Path:
    path.write_text("\n".join(map(",".join, rows)) + "\n")
    return path


def computing(name: str) -> list[list[str]]:
    return [list(map(str, row)) for row in list_compute_actions(SCHEDULES[name], 2, 4).values()]


@pytest.mark.parametrize("name", ["gpipe", "looped_bfs", "zbv_zero_bubble"])
def test_a_file_that_pytorch_wrote_is_taken(tmp_path: Path, name: str) -> None:
    spec = resolve_schedule_spec(write(tmp_path / "own.csv", computing(name)))
    assert spec.placement == SCHEDULES[name].placement
    check_microbatches(spec, 4, 2)
    with pytest.raises(SetupError, match=r"num_microbatches is 8; the schedule in .* is for 4. Use 4"):
        check_microbatches(spec, 8, 2)
    other = {"single": "gpipe", "loop": "looped_bfs", "v": "zbv_zero_bubble"}[spec.placement]
    assert choose_supported_schedule(spec, 8, 2).name == other
    assert f"run under {other}" in describe_schedule_fallback(spec, 8, 2)


def test_a_file_in_which_ranks_wait_for_each_other_is_refused(tmp_path: Path) -> None:
    rows = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    with pytest.raises(SetupError, match="Malformed compute schedule"):
        check_microbatches(resolve_schedule_spec(write(tmp_path / "own.csv", rows)), 2, 2)


@pytest.mark.parametrize("name", SCHEDULES)
def test_just_zero_bubble_and_dualpipev_have_backwards_in_two_parts(name: str) -> None:
    assert splits_backward(SCHEDULES[name]) is (name in SPLIT)


@pytest.mark.parametrize("name", SCHEDULES)
def test_resharding_after_forward_is_refused_with_backwards_in_two_parts(name: str) -> None:
    spec = SCHEDULES[name]
    check_schedule_sharding(spec, None, reshard_after_forward=True)
    check_schedule_sharding(spec, "replicate", reshard_after_forward=True)
    check_schedule_sharding(spec, "fsdp", reshard_after_forward=False)
    if name in SPLIT:
        with pytest.raises(SetupError, match=f"schedule {name} runs .* set reshard_after_forward to false"):
            check_schedule_sharding(spec, "fsdp", reshard_after_forward=True)
    else:
        check_schedule_sharding(spec, "fsdp", reshard_after_forward=True)


def test_resharding_is_refused_with_the_users_classes_and_files_too_where_they_split(tmp_path: Path) -> None:
    split = resolve_schedule_spec(write(tmp_path / "split.csv", computing("zbv_zero_bubble")))
    whole = resolve_schedule_spec(write(tmp_path / "whole.csv", computing("looped_bfs")))
    for spec in (split, resolve_schedule_spec(OwnZeroBubble)):
        with pytest.raises(SetupError, match="set reshard_after_forward to false"):
            check_schedule_sharding(spec, "fsdp", reshard_after_forward=True)
    check_schedule_sharding(whole, "fsdp", reshard_after_forward=True)
    with pytest.raises(SetupError, match="lists no actions, so it may run"):
        check_schedule_sharding(resolve_schedule_spec(Refuses), "fsdp", reshard_after_forward=True)


def test_schedules_that_never_reduce_gradients_are_refused_where_stages_are_shared() -> None:
    spec = resolve_schedule_spec(ListsNothing)
    check_schedule_sharding(spec, None, reshard_after_forward=False)
    with pytest.raises(SetupError, match="Derive it from _PipelineScheduleRuntime"):
        check_schedule_sharding(spec, "replicate", reshard_after_forward=False)
