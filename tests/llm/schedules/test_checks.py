"""What a schedule needs is asked before it can hang or be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch._functorch.config
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
)

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.schedules.checks import (
    Sharding,
    check_combination,
    check_microbatches,
    describe_replacement,
    fitting_schedule,
    splits_backward,
)
from lightning_pipe.llm.schedules.named import SCHEDULES, count_stages, find_schedule, place_stages
from lightning_pipe.llm.schedules.simulation import actions_of
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
    with pytest.raises(SetupError, match="num_microbatches must be at least 1, got 0"):
        check_microbatches(SCHEDULES[name], 0, 2)


def test_a_refusal_names_numbers_that_are_taken() -> None:
    with pytest.raises(SetupError, match=r"needs a multiple of its rounds, 2, .* Use 8 or 10"):
        check_microbatches(SCHEDULES["interleaved_1f1b"], 9, 4)
    for m in (8, 10):
        check_microbatches(SCHEDULES["interleaved_1f1b"], m, 4)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_number_that_a_schedule_does_not_take_runs_under_one_with_the_same_stages(name: str) -> None:
    spec = SCHEDULES[name]
    for m in range(1, 14):
        used = fitting_schedule(spec, m, 4)
        assert used.placement == spec.placement
        assert (used is spec) == needed(name, m, 4)
        check_microbatches(used, m, 4)


@pytest.mark.parametrize(
    ("name", "m", "other", "live", "usual", "usual_live"),
    [
        ("1f1b", 2, "gpipe", [2, 2, 2, 2], 4, [4, 3, 2, 1]),
        ("dualpipev", 3, "zbv_zero_bubble", [4, 5, 6, 6], 8, [9, 9, 9, 9]),
        ("interleaved_1f1b", 9, "looped_bfs", [18, 18, 18, 18], 8, [11, 9, 7, 5]),
        ("interleaved_zero_bubble", 9, "looped_bfs", [18, 18, 18, 18], 8, [8, 8, 8, 8]),
    ],
)
def test_the_cost_of_another_schedule_in_memory_is_said(
    name: str, m: int, other: str, live: list[int], usual: int, usual_live: list[int]
) -> None:
    said = describe_replacement(SCHEDULES[name], m, 4)
    assert said.startswith(f"num_microbatches is {m}; schedule {name} needs")
    assert f"run under {other}, with the same results" in said
    assert f"up to {live} micro-batches" in said
    assert said.endswith(f"under {name} with {usual} micro-batches they hold {usual_live}")


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
        (VOfMulti, None, "schedule VOfMulti has neighbouring stages on one rank, .* _PipelineScheduleRuntime"),
        (PlacedSchedule, 4, "stages_per_rank is 4; schedule PlacedSchedule needs two stages"),
        (Reversed, 1, r"forwards of the last stage, 1, in the order \[3, 2, 1, 0\]"),
    ],
)
def test_what_a_class_of_the_users_own_cannot_do_is_an_error(
    given: type, stages_per_rank: int | None, message: str
) -> None:
    with pytest.raises(SetupError, match=message):
        check_microbatches(find_schedule(given), 4, 2, stages_per_rank)


@pytest.mark.parametrize(("given", "message"), [(Refuses, "not on a Sunday"), (Reversed, "forwards of the last stage")])
def test_errors_for_reasons_other_than_the_number_of_microbatches_are_raised(given: type, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        fitting_schedule(find_schedule(given), 4, 2, 1)


def write(path: Path, rows: list[list[str]]) -> Path:
    path.write_text("\n".join(map(",".join, rows)) + "\n")
    return path


def with_messages(name: str) -> list[list[str]]:
    """What PyTorch makes of a schedule for 2 ranks and 4 micro-batches, with communication."""
    spec = SCHEDULES[name]
    ranks = place_stages(spec.placement, 2, 2 * count_stages(spec, 2))
    rows = actions_of(spec, 2, 4)
    lowered: dict[int, Any] = {r: _add_reduce_grad(list(_add_unshard_reshard(list(row))), 4) for r, row in rows.items()}
    return [list(map(str, row)) for row in _add_send_recv(lowered, ranks.__getitem__, len(ranks)).values()]


def computing(name: str) -> list[list[str]]:
    return [list(map(str, row)) for row in actions_of(SCHEDULES[name], 2, 4).values()]


@pytest.mark.parametrize("name", ["gpipe", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"])
@pytest.mark.parametrize("rows_of", [with_messages, computing])
def test_a_file_that_pytorch_wrote_is_taken(
    tmp_path: Path, name: str, rows_of: Callable[[str], list[list[str]]]
) -> None:
    spec = find_schedule(write(tmp_path / "own.csv", rows_of(name)))
    assert spec.placement == SCHEDULES[name].placement
    check_microbatches(spec, 4, 2)
    with pytest.raises(SetupError, match=r"num_microbatches is 8; the schedule in .* is for 4. Use 4"):
        check_microbatches(spec, 8, 2)
    other = {"single": "gpipe", "loop": "looped_bfs", "v": "zbv_zero_bubble"}[spec.placement]
    assert fitting_schedule(spec, 8, 2).name == other
    assert f"run under {other}" in describe_replacement(spec, 8, 2)


def receive_the_last_first(row: list[str]) -> None:
    for action in ("1RECV_F2", "1RECV_F3"):
        row.remove(action)
        row.insert(row.index("1F0"), action)
    swap(row, "1RECV_F2", "1RECV_F3")


def swap(row: list[str], one: str, other: str) -> None:
    i, j = row.index(one), row.index(other)
    row[i], row[j] = row[j], row[i]


BROKEN: dict[str, tuple[Callable[[list[list[str]]], None], str]] = {
    "received in another order": (
        lambda rows: receive_the_last_first(rows[1]),
        "from rank 0 to rank 1, as message 1, 0SEND_F1, where 0SEND_F3 is received",
    ),
    "not received": (lambda rows: rows[1].remove("1RECV_F3"), "1F3 on rank 1 without 1RECV_F3 before"),
    "received late": (lambda rows: swap(rows[0], "0RECV_B0", "0B0"), "0B0 on rank 0 without 0RECV_B0 before"),
    "not sent": (lambda rows: rows[0].remove("0SEND_F3"), "message 3, nothing, where 0SEND_F3 is received"),
    "sent early": (lambda rows: swap(rows[0], "0SEND_F1", "0F1"), "0SEND_F1 on rank 0 before what it sends"),
    "not computed": (lambda rows: rows[1].remove("1B3"), "1SEND_B3 on rank 1 before what it sends"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_file_whose_messages_do_not_match_is_refused(tmp_path: Path, how: str) -> None:
    change, message = BROKEN[how]
    rows = with_messages("gpipe")
    change(rows)
    with pytest.raises(SetupError, match=message):
        check_microbatches(find_schedule(write(tmp_path / "own.csv", rows)), 4, 2)
    with pytest.raises(SetupError, match=message):
        fitting_schedule(find_schedule(tmp_path / "own.csv"), 4, 2)


def test_a_file_in_which_ranks_wait_for_each_other_is_refused(tmp_path: Path) -> None:
    rows = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    with pytest.raises(SetupError, match="Malformed compute schedule"):
        check_microbatches(find_schedule(write(tmp_path / "own.csv", rows)), 2, 2)


@pytest.mark.parametrize("name", SCHEDULES)
def test_just_zero_bubble_and_dualpipev_have_backwards_in_two_parts(name: str) -> None:
    assert splits_backward(SCHEDULES[name]) is (name in SPLIT)


@pytest.mark.parametrize("name", SCHEDULES)
def test_ddp_is_refused_with_every_schedule(name: str) -> None:
    with pytest.raises(SetupError, match="use replicate"):
        check_combination(SCHEDULES[name], sharding="ddp", reshard_after_forward=None, compiled=False)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("sharding", [None, "fsdp", "replicate"])
@pytest.mark.parametrize("reshard", [None, False, True])
def test_resharding_after_forward_is_refused_with_backwards_in_two_parts(
    name: str, sharding: Sharding | None, reshard: bool | None
) -> None:
    def check() -> None:
        check_combination(SCHEDULES[name], sharding=sharding, reshard_after_forward=reshard, compiled=False)

    if name in SPLIT and sharding == "fsdp" and reshard:
        with pytest.raises(SetupError, match=f"schedule {name} runs .* set reshard_after_forward to false"):
            check()
    else:
        check()


def test_resharding_is_refused_with_the_users_classes_and_files_too_where_they_split(tmp_path: Path) -> None:
    split = find_schedule(write(tmp_path / "split.csv", computing("zbv_zero_bubble")))
    whole = find_schedule(write(tmp_path / "whole.csv", with_messages("looped_bfs")))
    for spec in (split, find_schedule(OwnZeroBubble)):
        with pytest.raises(SetupError, match="set reshard_after_forward to false"):
            check_combination(spec, sharding="fsdp", reshard_after_forward=True, compiled=False)
    check_combination(whole, sharding="fsdp", reshard_after_forward=True, compiled=False)
    with pytest.raises(SetupError, match="lists no actions, so it may run"):
        check_combination(find_schedule(Refuses), sharding="fsdp", reshard_after_forward=True, compiled=False)


@pytest.mark.parametrize("name", SCHEDULES)
def test_compiled_layers_need_donated_buffers_off_where_backwards_are_in_two_parts(name: str) -> None:
    def check() -> None:
        check_combination(SCHEDULES[name], sharding=None, reshard_after_forward=None, compiled=True)

    with torch._functorch.config.patch(donated_buffer=False):
        check()
    with torch._functorch.config.patch(donated_buffer=True):
        if name in SPLIT:
            with pytest.raises(SetupError, match=r"set torch\._functorch\.config\.donated_buffer to False"):
                check()
        else:
            check()


def test_schedules_that_never_reduce_gradients_are_refused_where_stages_are_shared(tmp_path: Path) -> None:
    def check(spec: Any, sharding: Sharding | None) -> None:
        check_combination(spec, sharding=sharding, reshard_after_forward=None, compiled=False)

    rows = with_messages("looped_bfs")
    unreduced = find_schedule(write(tmp_path / "a.csv", [[a for a in row if "REDUCE" not in a] for row in rows]))
    sharded = find_schedule(write(tmp_path / "b.csv", [[a for a in row if a != "3UNSHARD"] for row in rows]))
    for spec, message in (
        (unreduced, r"no REDUCE_GRAD for stage\(s\) \[0, 1, 2, 3\]"),
        (sharded, r"no UNSHARD for stage\(s\) \[3\]"),
        (find_schedule(ListsNothing), "Derive it from _PipelineScheduleRuntime"),
    ):
        check(spec, None)
        for sharding in ("fsdp", "replicate"):
            with pytest.raises(SetupError, match=message):
                check(spec, sharding)
