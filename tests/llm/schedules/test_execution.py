"""Steps of every schedule on two ranks: exact, nothing run twice, nothing kept."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.schedules.checks import check_microbatches
from lightning_pipe.llm.schedules.execution import (
    build_evaluation_schedule,
    build_schedule,
    check_shared_for_split_backward,
    run_schedule,
)
from lightning_pipe.llm.schedules.simulation import list_compute_actions
from lightning_pipe.llm.schedules.specs import SCHEDULES, ScheduleSpec, count_stages_per_rank, resolve_schedule_spec
from tests.distributed import run_ranks
from tests.llm.schedule_cases import (
    WIDTH,
    OwnSchedule,
    PlacedSchedule,
    backward_order,
    gradients_of,
    loss_of,
    make_batch,
    make_pieces,
    make_stages,
    run_whole,
    same,
)

STEPS = 2
# Fewer micro-batches than some schedules need in training.
EVALUATED = (1, 3)


@dataclass
class Case:
    """What a schedule did on one rank."""

    has_last: bool
    wrong: list[str] = field(default_factory=list)  # parameters whose gradients differ from one device's
    losses: list[Any] = field(default_factory=list)  # of each step, whether they are one device's; or the empty list
    outputs: list[Any] = field(default_factory=list)  # of an evaluation, likewise
    forwards: list[int] = field(default_factory=list)  # of each stage of the rank, in all steps
    kept: list[int] = field(default_factory=list)  # tensors of the batch that were still referenced after a step


def references(values: Iterable[Any]) -> list[weakref.ref[Any]]:
    return [weakref.ref(value) for value in values if isinstance(value, Tensor)]


def train(rank: int, spec: ScheduleSpec, m: int, *, views: bool = False) -> Case:
    num_stages = 2 * count_stages_per_rank(spec, 2)
    actions = list_compute_actions(spec, 2, m) or list_compute_actions(SCHEDULES["gpipe"], 2, m)
    order = {stage: backward_order(actions, stage) for stage in range(num_stages)}
    losses, _, gradients = run_whole(make_pieces(num_stages, views=views), m, order)

    check_microbatches(spec, m, 2)
    pieces = make_pieces(num_stages, views=views)
    stages = make_stages(spec, rank, pieces)
    alive: list[weakref.ref[Any]] = []

    def loss_in_view(output: Tensor, target: Tensor) -> Tensor:
        loss = loss_of(output, target).view(1)[0] if views else loss_of(output, target)
        alive.extend(references((output, target, loss)))
        return loss

    schedule = build_schedule(spec, stages, m, loss_in_view)
    case = Case(has_last=stages[-1].is_last)
    for _ in range(STEPS):
        for stage in stages:
            stage.submod.zero_grad()
        found: list[Tensor] = []
        args, kwargs, targets = make_batch(m)
        alive.extend(references((*(one for (one,) in args), *(one["factor"] for one in kwargs), *targets)))
        gc.collect()
        gc.disable()
        try:
            run_schedule(schedule, args, kwargs, targets, losses=found)
            del args, kwargs, targets
            case.kept.append(sum(one() is not None for one in alive))
        finally:
            gc.enable()
        assert not any(loss.requires_grad for loss in found)
        case.losses.append(same(found, losses) if found else found)
        for stage in stages:
            mine, theirs = gradients_of(stage.submod), gradients[stage.stage_index]
            assert mine.keys() == theirs.keys()
            case.wrong += [f"{stage.stage_index}.{name}" for name in mine if not torch.equal(mine[name], theirs[name])]
    case.forwards = [piece.forwards for piece in pieces if piece.forwards]
    return case


def evaluate(rank: int, spec: ScheduleSpec, m: int) -> Case:
    num_stages = 2 * count_stages_per_rank(spec, 2)
    losses, outputs, _ = run_whole(make_pieces(num_stages), m, dict.fromkeys(range(num_stages), ()))
    pieces = make_pieces(num_stages)
    stages = make_stages(spec, rank, pieces, train=False)
    alive: list[weakref.ref[Any]] = []

    def result_of(output: Tensor, target: Tensor) -> tuple[Tensor]:
        assert not output.requires_grad
        # Those before it are gone, unless they are to be returned.
        case.kept.append(sum(one() is not None for one in alive))
        alive.extend(references((output,)))
        return (loss_of(output, target),)

    schedule = build_evaluation_schedule(spec, stages, m, result_of)
    case = Case(has_last=stages[-1].is_last)
    found: list[Any] = []
    run_schedule(schedule, *make_batch(m), losses=found)
    case.losses.append(same([one for (one,) in found], losses) if found else found)
    # As Lightning does it: under inference mode, where FSDP's buffers must not be made.
    with torch.inference_mode():
        given: list[Any] = []
        run_schedule(
            build_evaluation_schedule(spec, stages, m, lambda output, target: output), *make_batch(m), losses=given
        )
    case.outputs.append(same(given, outputs) if given else given)
    assert not any(one.is_inference() for one in given)
    assert not any(gradients_of(piece) for piece in pieces)
    case.forwards = [piece.forwards for piece in pieces if piece.forwards]
    return case


def write_files(folder: Path) -> dict[str, Path]:
    files = {}
    for name in ("1f1b", "dualpipev"):
        files[f"file of {name}"] = path = folder / f"{name}.csv"
        rows = list_compute_actions(SCHEDULES[name], 2, 4)
        path.write_text("\n".join(",".join(map(str, row)) for row in rows.values()))
    return files


def run_all(rank: int, world_size: int, folder: str) -> dict[Any, Case]:
    gc.freeze()  # what was imported is not searched again and again
    cases: dict[Any, Case] = {}
    for name, spec in SCHEDULES.items():
        cases["train", name, 4] = train(rank, spec, 4)
        for m in EVALUATED:
            cases["evaluate", name, m] = evaluate(rank, spec, m)
    own = Path(folder) / str(rank)
    own.mkdir()
    for name, path in write_files(own).items():
        cases["train", name, 4] = train(rank, resolve_schedule_spec(path), 4)
        cases["evaluate", name, 3] = evaluate(rank, resolve_schedule_spec(path), 3)
    cases["train", "a class of the user's", 4] = train(rank, resolve_schedule_spec(OwnSchedule), 4)
    placed = resolve_schedule_spec(PlacedSchedule)
    cases["train", "a class in a V", 4], cases["evaluate", "a class in a V", 3] = (
        train(rank, placed, 4),
        evaluate(rank, placed, 3),
    )
    for name in ("1f1b", "interleaved_zero_bubble", "dualpipev"):
        cases["train", f"{name} with views", 4] = train(rank, SCHEDULES[name], 4, views=True)
    return cases


FILES = [f"file of {name}" for name in ("1f1b", "dualpipev")]
OTHERS = [
    *FILES,
    "a class of the user's",
    "a class in a V",
    *(f"{n} with views" for n in ("1f1b", "interleaved_zero_bubble", "dualpipev")),
]
TRAINED = [("train", name, 4) for name in SCHEDULES] + [("train", name, 4) for name in OTHERS]
ALL_EVALUATED = [("evaluate", name, m) for name in SCHEDULES for m in EVALUATED] + [
    ("evaluate", n, 3) for n in (*FILES, "a class in a V")
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Case]]:
    return run_ranks(run_all, 2, str(tmp_path_factory.mktemp("files")))


@pytest.mark.parametrize("key", TRAINED, ids=str)
def test_training_is_exact_runs_each_forward_once_and_keeps_nothing(ranks: list[dict[Any, Case]], key: Any) -> None:
    assert sorted(rank[key].has_last for rank in ranks) == [False, True]
    for rank in ranks:
        case = rank[key]
        assert case.wrong == []
        of_each: Any = True if case.has_last else []
        assert case.losses == [of_each] * STEPS
        assert set(case.forwards) == {STEPS * key[2]}
        assert case.kept == [0] * STEPS


@pytest.mark.parametrize("key", ALL_EVALUATED, ids=str)
def test_evaluation_is_exact_for_any_number_and_holds_one_output_at_a_time(
    ranks: list[dict[Any, Case]], key: Any
) -> None:
    for rank in ranks:
        case = rank[key]
        expected: list[Any] = [True, True] if case.has_last else [[], []]
        assert [*case.losses, *case.outputs] == expected
        assert set(case.forwards) == {2 * key[2]}
        assert case.kept == ([0] * key[2] if case.has_last else [])


def tied(*, first: bool) -> dict[int, nn.Module]:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
    module.append(module[0])
    return {0: module, 1: nn.Identity()} if first else {0: nn.Identity(), 1: module}


def test_a_parameter_that_is_used_twice_is_refused_where_the_backward_is_in_two_parts() -> None:
    with pytest.raises(SetupError, match=r"0\.weight and 2\.weight of stage 1 are one parameter"):
        check_shared_for_split_backward(SCHEDULES["zbv_zero_bubble"], tied(first=False))
    check_shared_for_split_backward(SCHEDULES["zbv_zero_bubble"], tied(first=True))
    check_shared_for_split_backward(SCHEDULES["interleaved_1f1b"], tied(first=False))
