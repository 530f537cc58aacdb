"""Events of stages: what ran, in which order, and what was waited for."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from lightning_pipe.engine.observe.timeline import Bar, microbatch_bar
from lightning_pipe.llm.schedules.execution import build_schedule, run_schedule
from lightning_pipe.llm.schedules.simulation import list_compute_actions
from lightning_pipe.llm.schedules.specs import SCHEDULES, count_stages_per_rank
from lightning_pipe.llm.schedules.timed_stage import TimedStage, compute_median_stage_durations
from tests.distributed import run_ranks
from tests.llm.schedule_cases import loss_of, make_batch, make_pieces, make_stages, stage_of

MICROBATCHES = 4
# One stage, a loop with backwards in two parts, a V.
NAMES = ("1f1b", "interleaved_zero_bubble", "dualpipev")
KINDS = {"forward": "F", "backward": "B", "input_backward": "I", "weight_backward": "W"}


class Recorded:
    """One rank's events of a step of a schedule, and when its losses were computed."""

    def __init__(self) -> None:
        self.train: list[Bar] = []
        self.losses: list[tuple[float, float]] = []


def make_neighbor_late(stages: list[TimedStage], rank: int, name: str) -> None:
    """Rank 0 begins its first forward once rank 1 has asked for the result."""
    store = _get_default_store()
    if rank == 0:
        stages[0].submod.register_forward_pre_hook(lambda *_: store.wait([name]))
    else:
        stage: Any = stages[0]
        asked = stage.get_fwd_recv_ops

        def ask(index: int) -> Any:
            ops = asked(index)
            store.set(name, "asked")
            return ops

        stage.get_fwd_recv_ops = ask


def record(rank: int, name: str) -> Recorded:
    recorded, spec = Recorded(), SCHEDULES[name]
    pieces = make_pieces(2 * count_stages_per_rank(spec, 2))

    def timed_loss(output: Tensor, target: Tensor) -> Tensor:
        start = time.perf_counter()
        loss = loss_of(output, target)
        recorded.losses.append((start, time.perf_counter()))
        return loss

    stages = make_stages(spec, rank, pieces, events=recorded.train, recording=lambda: True)
    make_neighbor_late(stages, rank, name)
    schedule = build_schedule(spec, stages, MICROBATCHES, timed_loss)
    run_schedule(schedule, *make_batch(MICROBATCHES))
    dist.barrier()
    return recorded


def record_all(rank: int, world_size: int) -> dict[str, Recorded]:
    return {name: record(rank, name) for name in NAMES}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Recorded]]:
    return run_ranks(record_all, 2)


def of_neighbor(name: str, rank: int, event: Bar) -> bool:
    """Whether what the event needs comes from the other rank."""
    stages = {action.stage_index: r for r, row in list_compute_actions(SCHEDULES[name], 2, 4).items() for action in row}
    step = {"forward": -1, "backward": 1, "input_backward": 1, "weight_backward": 0}[event.kind]
    return stages.get(stage_of(event) + step, rank) != rank


@pytest.mark.parametrize("name", NAMES)
def test_what_ran_is_what_the_schedule_lists_in_its_order(ranks: list[dict[str, Recorded]], name: str) -> None:
    for rank, row in list_compute_actions(SCHEDULES[name], 2, MICROBATCHES).items():
        events = [event for event in ranks[rank][name].train if event.kind in KINDS]
        assert [f"{e.stage}{KINDS[e.kind]}{e.microbatch}" for e in events] == list(map(str, row))


@pytest.mark.parametrize("name", NAMES)
def test_there_is_a_wait_just_before_what_needs_a_neighbors_tensors(
    ranks: list[dict[str, Recorded]], name: str
) -> None:
    for rank, recorded in enumerate(ranks):
        events = recorded[name].train
        waited = {id(after): wait for wait, after in pairwise(events) if wait.kind.startswith("wait")}
        for event in events:
            if event.kind not in KINDS:
                continue
            assert (id(event) in waited) == of_neighbor(name, rank, event)
            if id(event) in waited:
                wait = waited[id(event)]
                kind = "wait_forward" if event.kind == "forward" else "wait_backward"
                assert (wait.stage, wait.kind, wait.microbatch) == (event.stage, kind, event.microbatch)
                assert wait.end == event.start


@pytest.mark.parametrize("name", NAMES)
def test_a_wait_for_a_late_neighbor_includes_the_neighbors_forward(ranks: list[dict[str, Recorded]], name: str) -> None:
    first = ranks[0][name].train[0]
    wait = ranks[1][name].train[0]
    assert [(one.stage, one.kind, one.microbatch) for one in (first, wait)] == [
        (0, "forward", 0),
        (1, "wait_forward", 0),
    ]
    assert wait.start < first.end < wait.end


@pytest.mark.parametrize("name", NAMES)
def test_the_forward_of_the_last_stage_includes_its_loss(ranks: list[dict[str, Recorded]], name: str) -> None:
    last = 2 * count_stages_per_rank(SCHEDULES[name], 2) - 1
    for recorded in ranks:
        forwards = [e for e in recorded[name].train if (e.stage, e.kind) == (last, "forward")]
        losses = recorded[name].losses[: len(forwards)]
        assert len(forwards) == len(losses)
        for forward, (start, end) in zip(forwards, losses, strict=True):
            assert forward.start < start
            assert end <= forward.end


def test_durations_are_medians_in_seconds_by_stage_and_kind() -> None:
    taken = {(0, "forward"): [5, 1, 3], (1, "backward"): [2, 4]}
    events = [
        microbatch_bar(stage, kind, index, 100.0, 100.0 + seconds)
        for (stage, kind), times in taken.items()
        for index, seconds in enumerate(times)
    ]
    assert compute_median_stage_durations(events) == pytest.approx({(0, "forward"): 3.0, (1, "backward"): 3.0})


def test_turns_of_the_same_work_are_one_duration() -> None:
    first = microbatch_bar(0, "forward", 1, 0.0, 1.0)
    beside = microbatch_bar(1, "backward", 0, 1.0, 5.0)
    second = microbatch_bar(0, "forward", 1, 5.0, 7.0)._replace(name="forward continued")
    assert compute_median_stage_durations([first, beside, second]) == {(0, "forward"): 3.0, (1, "backward"): 4.0}
