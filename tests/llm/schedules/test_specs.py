"""Schedules by name, class or file, and the stages that ranks hold."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    _ComputationType,
    get_schedule_class,
)

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.schedules.simulation import list_compute_actions
from lightning_pipe.llm.schedules.specs import (
    SCHEDULES,
    ScheduleOptions,
    _PlaceholderStage,
    count_stages_per_rank,
    instantiate_schedule,
    resolve_schedule_spec,
    stages_of_rank,
)
from tests.llm.schedule_cases import PlacedSchedule, UnbalancedSchedule


class OwnSingle(ScheduleGPipe):
    pass


class OwnMulti(ScheduleInterleaved1F1B):
    pass


class OwnV(ScheduleZBVZeroBubble):
    pass


def write_actions(path: Path, name: str, pp_size: int, num_microbatches: int) -> Path:
    rows = list_compute_actions(SCHEDULES[name], pp_size, num_microbatches)
    path.write_text("\n".join(",".join(map(str, rows[rank])) for rank in range(pp_size)) + "\n")
    return path


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_found_by_our_name_pytorchs_name_and_its_class(name: str) -> None:
    spec = SCHEDULES[name]
    names = [name, name.upper()]
    if spec.schedule_class.__module__.startswith("torch."):
        pytorch_name = spec.schedule_class.__name__
        assert get_schedule_class(pytorch_name.removeprefix("Schedule")) is spec.schedule_class
        names += [pytorch_name, pytorch_name.lower(), pytorch_name.removeprefix("Schedule")]
    for given in names:
        assert resolve_schedule_spec(given) == spec
    assert resolve_schedule_spec(spec.schedule_class) == spec


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(SetupError, match="'2f2b'; expected one of gpipe, 1f1b, ") as caught:
        resolve_schedule_spec("2f2b")
    assert all(name in str(caught.value) for name in SCHEDULES)


@pytest.mark.parametrize(
    ("given", "placement"),
    [(OwnSingle, "single"), (OwnMulti, "loop"), (OwnV, "v"), (PlacedSchedule, "v"), (UnbalancedSchedule, "loop")],
)
def test_a_class_of_the_users_own_is_placed_as_it_lists_its_stages(given: type, placement: str) -> None:
    spec = resolve_schedule_spec(given)
    assert (spec.name, spec.schedule_class, spec.placement) == (given.__name__, given, placement)


@pytest.mark.parametrize("given", [dict, PipelineScheduleSingle])
def test_a_class_that_is_no_schedule_is_refused(given: type) -> None:
    with pytest.raises(SetupError, match=f"class {given.__name__}; expected one that derives from"):
        resolve_schedule_spec(given)


@pytest.mark.parametrize(
    ("name", "placement"), [("1f1b", "single"), ("interleaved_1f1b", "loop"), ("zbv_zero_bubble", "v")]
)
def test_the_placement_of_a_file_is_read_out_of_it(tmp_path: Path, name: str, placement: str) -> None:
    path = write_actions(tmp_path / "own.csv", name, 2, 4)
    for given in (path, str(path)):
        spec = resolve_schedule_spec(given)
        assert (spec.placement, spec.path) == (placement, path)
    assert stages_of_rank(spec, 1, 2) == stages_of_rank(SCHEDULES[name], 1, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read .*not a file"),
        ("0F0,0B0\nfoo,1B0\n", "cannot be read: Invalid action string: foo"),
        ("0F0,0SEND_F0,0B0\n1F0,1B0\n", "has 0SEND_F0; expected computations only"),
        ("", r"has no actions for rank\(s\) 0"),
        ("0F0,0B0\n\n", r"has no actions for rank\(s\) \[1\]"),
        ("0F0,0B0\n0F0,1B0\n", "has stage 0 on ranks 0 and 1"),
        ("0F0,0B0\n2F0,2B0\n", "has its stages 0 on rank 0, 2 on rank 1; expected, for rank r of"),
        ("1F0,1B0\n0F0,0B0\n", "has its stages 0 on rank 1, 1 on rank 0; expected, for rank r of"),
        ("0F0,1F0,1B0,0B0\n2F0,2B0\n", "has its stages 0 on rank 0, 1 on rank 0, 2 on rank 1"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "own.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SetupError, match=message):
        resolve_schedule_spec(path)


@pytest.mark.parametrize(
    ("name", "stages_per_rank", "placed"),
    [
        ("gpipe", None, [(0,), (1,), (2,)]),
        ("1f1b", 1, [(0,), (1,), (2,)]),
        ("looped_bfs", None, [(0, 3), (1, 4), (2, 5)]),
        ("interleaved_1f1b", 3, [(0, 3, 6), (1, 4, 7), (2, 5, 8)]),
        ("interleaved_zero_bubble", 1, [(0,), (1,), (2,)]),
        ("zbv_zero_bubble", None, [(0, 5), (1, 4), (2, 3)]),
        ("dualpipev", 2, [(0, 5), (1, 4), (2, 3)]),
    ],
)
def test_stages_are_placed_singly_in_a_loop_or_in_a_v(
    name: str, stages_per_rank: int | None, placed: list[tuple[int, ...]]
) -> None:
    assert [stages_of_rank(SCHEDULES[name], rank, 3, stages_per_rank) for rank in range(3)] == placed


@pytest.mark.parametrize(
    ("name", "stages_per_rank", "needed"),
    [
        ("gpipe", 2, "one stage"),
        ("1f1b", 0, "one stage"),
        ("interleaved_1f1b", 0, "at least one stage"),
        ("zbv_zero_bubble", 1, "two stages"),
        ("dualpipev", 3, "two stages"),
    ],
)
def test_other_numbers_of_stages_a_rank_are_refused(name: str, stages_per_rank: int, needed: str) -> None:
    with pytest.raises(SetupError, match=f"stages_per_rank is {stages_per_rank}; schedule {name} needs {needed}"):
        stages_of_rank(SCHEDULES[name], 0, 2, stages_per_rank)


def test_a_file_is_for_its_own_number_of_ranks_and_stages(tmp_path: Path) -> None:
    spec = resolve_schedule_spec(write_actions(tmp_path / "own.csv", "interleaved_1f1b", 2, 4))
    assert count_stages_per_rank(spec, 2) == 2
    with pytest.raises(SetupError, match="is for 2 ranks, and the pipeline has 4"):
        count_stages_per_rank(spec, 4)
    with pytest.raises(SetupError, match=r"stages_per_rank is 1; .* needs 2 stage\(s\), as in the file"):
        count_stages_per_rank(spec, 2, 1)


def test_dualpipev_sends_what_a_forward_gives_before_the_backward_that_is_listed_with_it() -> None:
    stages = [_PlaceholderStage(index, 4, 2) for index in (0, 3)]
    schedule = instantiate_schedule(SCHEDULES["dualpipev"], stages, 8)
    rows = schedule.pipeline_order_with_comms  # type: ignore[attr-defined]
    sent = 0
    for row in rows.values():
        assert not [action for action in row if action.sub_actions]
        for action, following in pairwise(row):
            if action.computation_type is _ComputationType.FORWARD and action.stage_index in (0, 2):
                assert str(following) == str(action).replace("F", "SEND_F")
                sent += 1
    assert sent == 16


# ---------------------------------------------------------------------- options


def lowered(name: str, stages_per_rank: int = 2, **options: Any) -> list[list[str]]:
    """Computations and messages of each rank."""
    spec = resolve_schedule_spec(name, ScheduleOptions(**options))
    count = 2 * stages_per_rank
    stages = [_PlaceholderStage(index, count, 2) for index in stages_of_rank(spec, 0, 2, stages_per_rank)]
    rows = instantiate_schedule(spec, stages, 8).pipeline_order_with_comms  # type: ignore[attr-defined]
    return [list(map(str, row)) for row in rows.values()]


def without_receives(actions: list[str]) -> list[str]:
    return [action for action in actions if "RECV" not in action]


def message(action: str) -> tuple[int, str, int]:
    """Receiving stage, direction and micro-batch of a message that is sent or received."""
    stage, kind, direction, microbatch = re.fullmatch(r"(\d+)(SEND|RECV)_(F|B)(\d+)", action).groups()  # type: ignore[union-attr]
    step = 0 if kind == "RECV" else 1 if direction == "F" else -1
    return int(stage) + step, direction, int(microbatch)


SEVERAL = ["looped_bfs", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev"]


@pytest.mark.parametrize("name", SEVERAL)
def test_deferred_receives_come_later_and_nothing_else_changes(name: str) -> None:
    early, deferred = lowered(name), lowered(name, defer_pp_recv=True)
    assert early != deferred
    for row, other in zip(early, deferred, strict=True):
        assert sorted(row) == sorted(other)
        assert without_receives(row) == without_receives(other)
        for received in {*row} - {*without_receives(row)}:
            before, after = (without_receives(actions[: actions.index(received)]) for actions in (row, other))
            assert len(before) <= len(after) < len(without_receives(row))
    # Both ranks receive what the other sends in the order in which it is sent: messages have no names.
    for sender, receiver in (deferred, deferred[::-1]):
        sent = [action for action in sender if "SEND" in action]
        arrived = [action for action in receiver if "RECV" in action]
        assert [message(action) for action in sent] == [message(action) for action in arrived]


@pytest.mark.parametrize("most", [1, 2, 4])
def test_so_many_stages_are_gathered_at_a_time(most: int) -> None:
    for row in lowered("interleaved_1f1b", 4, max_active_stages=most):
        active: set[str] = set()
        largest = 0
        for action in row:
            if action.endswith("UNSHARD"):
                active.add(action.removesuffix("UNSHARD"))
            elif action.endswith("RESHARD"):
                active.remove(action.removesuffix("RESHARD"))
            largest = max(largest, len(active))
        assert largest == most


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_options_of_schedules_with_several_stages_are_refused_for_others(name: str) -> None:
    assert resolve_schedule_spec(name, ScheduleOptions()).options == ScheduleOptions()
    with pytest.raises(SetupError, match=rf"defer_pp_recv=True.*schedule {name} does not run.*interleaved_1f1b"):
        resolve_schedule_spec(name, ScheduleOptions(defer_pp_recv=True))


@pytest.mark.parametrize("options", [{"defer_pp_recv": 1}, {"max_active_stages": 0}, {"max_active_stages": True}])
def test_options_of_another_type_or_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match=next(iter(options))):
        ScheduleOptions(**options)
