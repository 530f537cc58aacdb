"""Planner: variants of plans are valid, within their limits, and predicted to be fast; and the choice between plans."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, State, TaskSchedule
from lightning_pipe.engine.planning.costs import Machine, TaskCost
from lightning_pipe.engine.planning.plan_choice import (
    choose_measured_plan,
    interquartile_mean,
    max_generated_plans,
    select_survivors,
)
from lightning_pipe.engine.planning.planner import propose_plan_variants
from lightning_pipe.engine.planning.simulation import simulate
from tests.engine.synthetic import random_graph


def nothing(ctx: IterContext) -> None:
    """The task's function: planning never calls it."""


def task(name: str, reads: Iterable[str] = (), writes: Iterable[str] = (), **options: Any) -> PipelineTask:
    return PipelineTask(name, nothing, reads=reads, writes=writes, **options)


# ---------------------------------------------------------------------- variants


@pytest.mark.parametrize("seed", range(8))
def test_variants_are_within_the_limits_and_the_best_is_first_and_faster_than_the_serial_plan(seed: int) -> None:
    graph = random_graph(seed)
    variants = graph.variants()
    assert 1 <= len(variants) <= 5
    assert [plan.name for plan in variants] == [f"auto_{number}" for number in range(1, len(variants) + 1)]
    times = [simulate(plan, graph.costs, graph.machine).seconds_per_iteration for plan in variants]
    assert times[0] < simulate(graph.serial_plan(), graph.costs, graph.machine).seconds_per_iteration
    assert all(after >= before * 0.99 for before, after in itertools.pairwise(times))
    for plan in variants:
        assert not plan.stale
        assert plan.pipeline_depth <= graph.max_in_flight
        assert plan.schedule["step"] == TaskSchedule()


INPUT = ("copy", "exchange")


def input_then_training(**options: Any) -> tuple[PipelinePlan, dict[str, TaskCost]]:
    tasks = [
        task("copy", ["batch"], ["x"], **options),
        task("exchange", ["x"], ["y"]),
        task("train", ["y", State("parameters")], ["g"], **options),
        task("step", ["g"], [State("parameters")]),
    ]
    costs = {
        "copy": TaskCost(2e-3, "copy"),
        "exchange": TaskCost(5e-3, "network"),
        "train": TaskCost(6e-3),
        "step": TaskCost(1e-3),
    }
    return PipelinePlan([(one, TaskSchedule()) for one in tasks], name="serial"), costs


def test_input_goes_ahead_in_workers_until_training_is_all_that_is_left() -> None:
    serial, costs = input_then_training()
    best = propose_plan_variants([serial], costs, Machine(), movable=INPUT, on_workers=INPUT)[0]
    assert simulate(best, costs).seconds_per_iteration == pytest.approx(7e-3)
    # The simplest of those: both in one worker, one batch ahead.
    assert len(best.thread_group_names) == 2
    assert best.pipeline_depth == 2


@pytest.mark.parametrize("pair", [("step", "copy"), ("copy", "train"), ("exchange", "copy")])
def test_a_task_is_submitted_after_the_task_that_it_must_follow(pair: tuple[str, str]) -> None:
    serial, costs = input_then_training()
    variants = propose_plan_variants(
        [serial], costs, Machine(), movable=INPUT, on_workers=INPUT, submitted_before=[pair]
    )
    assert variants
    for plan in variants:
        assert plan.order.index(pair[0]) < plan.order.index(pair[1])


def test_tasks_that_may_not_move_keep_their_stage_and_all_tasks_keep_their_stream() -> None:
    serial, costs = input_then_training()
    streams = {"copy": "memcpy", "exchange": "data_dist", "train": None, "step": None}
    written = PipelinePlan([(serial.tasks[name], TaskSchedule(stream=streams[name])) for name in streams])
    machine = Machine(cores=1, device_streams=True)
    for plan in propose_plan_variants([written], costs, machine, movable=INPUT):
        assert {name: where.stream for name, where in plan.schedule.items()} == streams
        assert plan.schedule["train"] == plan.schedule["step"] == TaskSchedule()


def test_collectives_of_a_process_group_stay_in_their_thread() -> None:
    serial, costs = input_then_training(collectives=("world",))
    variants = propose_plan_variants([serial], costs, Machine(), movable=INPUT, on_workers=INPUT)
    assert variants
    assert all(plan.schedule["copy"].thread_group == "main" for plan in variants)


# ---------------------------------------------------------------------- the choice


def chosen(by_hand: Sequence[Sequence[float]], found: Sequence[Sequence[float]]) -> str:
    """The fastest of plans by what they took: ``hand0``, ``hand1`` ..., ``auto0`` ..."""
    hand = {f"hand{index}": times for index, times in enumerate(by_hand)}
    return choose_measured_plan({**hand, **{f"auto{index}": times for index, times in enumerate(found)}}, list(hand))


def test_the_winner_is_never_slower_than_the_best_hand_written_plan() -> None:
    draw = random.Random(0)
    won = 0
    for _ in range(300):
        rounds = draw.randint(1, 12)
        speeds = [draw.choice([1.0, 1.02, 1.2]) for _ in range(draw.randint(2, 6))]
        times = [[speed + 0.05 * draw.random() for _ in range(rounds)] for speed in speeds]
        hand = draw.randint(1, len(speeds) - 1)
        winner = chosen(times[:hand], times[hand:])
        best = min(map(interquartile_mean, times[:hand]))
        measured = times[int(winner[4:]) + (hand if winner.startswith("auto") else 0)]
        assert interquartile_mean(measured) <= best
        if winner.startswith("auto"):
            won += 1
            assert interquartile_mean(measured) < best
    assert won > 30


def test_a_plan_that_is_faster_in_every_round_wins_although_the_machine_drifts() -> None:
    drift = [1.0 + index for index in range(9)]
    by_hand = [drift, [2 * time for time in drift]]
    assert chosen(by_hand, [[0.99 * time for time in drift], [1.5 * time for time in drift]]) == "auto0"


def test_what_is_typical_is_the_mean_of_the_middle_half() -> None:
    assert interquartile_mean([3.0]) == 3.0
    assert interquartile_mean([1.0, 4.0]) == 2.5
    assert interquartile_mean([9.0, 1.0, 2.0]) == 2.0
    assert interquartile_mean([99.0, 1.0, 2.0, 4.0]) == 3.0
    assert interquartile_mean([0.0, 99.0, 2.0, 4.0, 6.0, 8.0, 0.0, 99.0]) == 5.0


def left(by_hand: Sequence[Sequence[float]], found: Sequence[Sequence[float]] = ()) -> list[str]:
    """Those that go on."""
    hand = {f"hand{index}": times for index, times in enumerate(by_hand)}
    return select_survivors({**hand, **{f"auto{index}": times for index, times in enumerate(found)}}, list(hand))


def test_plans_that_lose_beyond_noise_drop_out_of_the_race() -> None:
    near, far = [1.0, 1.2, 1.0, 1.2, 1.0, 1.2], [2.0] * 6
    assert left([[1.1] * 6, near, far]) == ["hand0", "hand1"]
    assert left([[1.1] * 6, near], [far, [1.15, 1.05] * 3]) == ["hand0", "hand1", "auto1"]
    # Nothing written by hand drops out for a found plan, which may not be taken in the end.
    assert left([[1.1] * 6, [1.15, 1.05] * 3], [[1.0] * 6]) == ["hand0", "hand1", "auto0"]
    assert left([[1.1] * 2, far[:2]]) == ["hand0", "hand1"]  # two rounds show nothing
    assert left([[1.1] * 6, near, far[:5]]) == ["hand0", "hand1"]  # it has dropped out before


def test_few_rounds_prove_nothing_and_the_more_plans_the_less() -> None:
    assert [max_generated_plans(rounds) for rounds in range(1, 9)] == [0, 0, 0, 0, 1, 3, 6, 12]
    for rounds in range(1, 9):
        most = max_generated_plans(rounds)
        assert chosen([[1.0] * rounds], [[0.5] * rounds] * (most + 1)) == "hand0"
        if most:
            assert chosen([[1.0] * rounds], [[0.5] * rounds] * most) == "auto0"


def test_plans_that_have_dropped_out_share_in_the_level_too() -> None:
    hand, winner, loser = {"hand": [1.0] * 5}, {"auto0": [0.5] * 5}, {"auto1": [9.0] * 3}
    # Five of five is enough to take one of one, and not one of two, whichever of them is still measured.
    assert choose_measured_plan({**hand, **winner}, ["hand"]) == "auto0"
    assert choose_measured_plan({**hand, **winner, **loser}, ["hand"]) == "hand"
