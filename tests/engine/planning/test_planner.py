"""Plans that are found: valid, the same on every rank, near what is possible; and the choice between measured ones."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, PlanError, State, SWPipeline, TaskSchedule
from lightning_pipe.engine.planning.costs import Machine, TaskCost
from lightning_pipe.engine.planning.cycle_ratio import Edge, maximum_cycle_ratio
from lightning_pipe.engine.planning.modulo_schedule import Claim, Loop, Wait, modulo_schedule
from lightning_pipe.engine.planning.plan_bound import lower_bound
from lightning_pipe.engine.planning.plan_choice import contenders, fastest, most_found, typical
from lightning_pipe.engine.planning.plan_draft import PlanSpace
from lightning_pipe.engine.planning.plan_limits import PlanLimits
from lightning_pipe.engine.planning.planner import PlanCandidate, find_plans
from lightning_pipe.engine.planning.simulation import simulate
from lightning_pipe.engine.plans.dependencies import Dependency
from tests.engine.exhaustive import best_of_all
from tests.engine.synthetic import Graph, random_graph
from tests.engine.within import within
from tests.patience import HANG

GRAPHS = range(30)
SMALL = 5  # tasks of a graph for which every plan can be tried


def nothing(ctx: IterContext) -> None:
    """The task's function: planning never calls it."""


def task(name: str, reads: Iterable[str] = (), writes: Iterable[str] = ()) -> PipelineTask:
    return PipelineTask(name, nothing, reads=reads, writes=writes)


def found(graph: Graph, **options: Any) -> list[PlanCandidate]:
    return find_plans(graph.tasks, graph.costs, graph.limits, graph.machine, **options)


def text(candidates: Sequence[PlanCandidate]) -> list[Any]:
    return [(one.plan.to_yaml(), one.seconds, one.why) for one in candidates]


# ---------------------------------------------------------------------- what is found


@pytest.mark.parametrize("seed", GRAPHS)
def test_the_best_plan_is_near_the_bound_or_the_best_there_is_and_keeps_the_limits(seed: int) -> None:
    graph = random_graph(seed)
    candidates = found(graph)
    on_main = [one.name for one in graph.tasks if one.name not in graph.limits.on_workers]
    bound = lower_bound(graph.tasks, graph.costs, graph.limits.max_in_flight, graph.machine, on_main=on_main)
    best = candidates[0].seconds
    assert best >= bound.seconds * (1 - 1e-9)
    if best > 1.05 * bound.seconds:
        assert len(graph.tasks) <= SMALL
        exhaustive = best_of_all(graph)
        assert best <= 1.001 * exhaustive.seconds
    assert 1 <= len(candidates) <= 5
    for plan, predicted, why in candidates:
        assert simulate(plan, graph.costs, graph.machine).seconds_per_iteration == pytest.approx(predicted)
        assert weighed(graph, plan, predicted) >= weighed(graph, *candidates[0][:2]) * (1 - 1e-3)
        assert bound.reason in why
        assert not plan.stale
        assert plan.pipeline_depth <= graph.limits.max_in_flight
        assert len(plan.thread_groups) - 1 <= graph.limits.max_workers
        assert plan.schedule["step"] == TaskSchedule()
        for name, where in plan.schedule.items():
            assert where.thread_group == "main" or name in graph.limits.on_workers


@pytest.mark.parametrize("seed", [seed for seed in range(60) if len(random_graph(seed).tasks) <= 4][:6])
def test_no_plan_of_a_small_graph_is_better_than_the_one_found(seed: int) -> None:
    graph = random_graph(seed)
    exhaustive = best_of_all(graph)
    assert found(graph)[0].seconds <= exhaustive.seconds * (1 + 1e-3)


@pytest.mark.parametrize("seed", [195, 227, 291])
def test_where_no_schedule_is_found_small_changes_come_near_the_bound(seed: int) -> None:
    graph = random_graph(seed)
    bound = lower_bound(graph.tasks, graph.costs, graph.limits.max_in_flight, graph.machine)
    assert found(graph)[0].seconds <= 1.05 * bound.seconds


def test_the_same_costs_give_the_same_plans() -> None:
    for seed in (3, 8, 14):
        assert text(found(random_graph(seed))) == text(found(random_graph(seed)))


def test_a_found_plan_trains_every_batch_in_order() -> None:
    for seed in (1, 5, 6):
        graph = random_graph(seed)
        plan = found(graph)[0].plan

        def train(plan: PipelinePlan = plan) -> list[Any]:
            with SWPipeline(plan) as pipeline:
                data = iter(range(7))
                return [pipeline.progress(data).batch for _ in range(7)]

        assert within(HANG, train, plan) == list(range(7))


def input_then_training() -> tuple[list[PipelineTask], dict[str, TaskCost]]:
    tasks = [
        task("copy", ["batch"], ["x"]),
        task("exchange", ["x"], ["y"]),
        task("train", ["y", State("parameters")], ["g"]),
        task("step", ["g"], [State("parameters")]),
    ]
    costs = {
        "copy": TaskCost(2e-3, "copy"),
        "exchange": TaskCost(5e-3, "network"),
        "train": TaskCost(6e-3),
        "step": TaskCost(1e-3),
    }
    return tasks, costs


def test_input_goes_ahead_in_workers_until_training_is_all_that_is_left() -> None:
    tasks, costs = input_then_training()
    limits = PlanLimits(on_workers=frozenset({"copy", "exchange"}), by_caller=frozenset({"train", "step"}))
    best = find_plans(tasks, costs, limits)[0]
    assert best.seconds == pytest.approx(7e-3)
    assert "no plan can be faster: train -> step -> train takes 7.00 ms and spans 1 iteration" in best.why
    # The simplest of those: both in one worker, one batch ahead.
    assert best.plan.thread_groups == ("main", "copy_network")
    assert best.plan.pipeline_depth == 2


def crowding(graph: Graph, plan: PipelinePlan) -> int:
    """Threads that compute beyond the cores there are."""
    computing = {where.thread_group for name, where in plan.schedule.items() if graph.costs[name].resource == "compute"}
    return max(0, len(computing) - int(graph.machine.cores))


def weighed(graph: Graph, plan: PipelinePlan, predicted: float) -> float:
    return predicted * (1 + 0.03 * crowding(graph, plan))


# In the first, plans whose threads share cores are predicted to be 3 % faster.
@pytest.mark.parametrize("seed", [0, 14, 22, 28])
def test_of_plans_that_are_about_equal_that_one_is_best_whose_threads_need_not_share_cores(seed: int) -> None:
    graph = random_graph(seed)
    assert crowding(graph, found(graph)[0].plan) == 0


def test_with_one_batch_in_flight_or_no_workers_little_can_be_done() -> None:
    tasks, costs = input_then_training()
    workers = frozenset({"copy", "exchange"})
    assert find_plans(tasks, costs, PlanLimits(1, workers))[0].seconds == pytest.approx(14e-3)
    assert find_plans(tasks, costs, PlanLimits(3))[0].seconds == pytest.approx(14e-3)
    costs["copy"] = TaskCost(2e-3, "copy", background=3e-3, waited_by="exchange")
    # The main thread alone can still have work in the background.
    serial, best = (find_plans(tasks, costs, PlanLimits(depth))[0].seconds for depth in (1, 2))
    assert (serial, best) == pytest.approx((17e-3, 14e-3))


def test_no_more_batches_are_in_flight_than_memory_allows() -> None:
    tasks, costs = input_then_training()
    costs["copy"] = TaskCost(7e-3, "disk")
    costs["exchange"] = TaskCost(7e-3, "network")
    for depth, expected in ((1, 21e-3), (2, 10.5e-3), (3, 7e-3)):
        limits = PlanLimits(depth, frozenset({"copy", "exchange"}), frozenset({"train", "step"}))
        best = find_plans(tasks, costs, limits)[0]
        assert best.plan.pipeline_depth <= depth
        assert best.seconds == pytest.approx(expected)


def test_a_task_is_submitted_after_the_one_it_is_to_follow() -> None:
    tasks, costs = input_then_training()
    workers = frozenset({"copy", "exchange"})
    for pair in (("step", "copy"), ("copy", "train"), ("exchange", "copy")):
        limits = PlanLimits(3, workers, frozenset({"train", "step"}), submitted_before=(pair,))
        for candidate in find_plans(tasks, costs, limits):
            assert candidate.plan.order.index(pair[0]) < candidate.plan.order.index(pair[1])


def test_tasks_get_the_stream_of_their_resource_but_not_what_the_caller_runs() -> None:
    tasks, costs = input_then_training()
    limits = PlanLimits(3, by_caller=frozenset({"train", "step"}), streams={"copy": "memcpy", "compute": "side"})
    best = find_plans(tasks, costs, limits, Machine(cores=1, device_streams=True))[0]
    streams = {name: where.stream for name, where in best.plan.schedule.items()}
    assert streams == {"copy": "memcpy", "exchange": None, "train": None, "step": None}


def test_a_hand_written_plan_is_never_worse_than_what_is_found() -> None:
    tasks, costs = input_then_training()
    schedule = [TaskSchedule(2), TaskSchedule(1, thread_group="w"), TaskSchedule(), TaskSchedule()]
    written = PipelinePlan(zip(tasks, schedule, strict=True), name="written")
    limits = PlanLimits(3, frozenset({"exchange"}), frozenset({"train", "step"}))
    best = find_plans(tasks, costs, limits, hand_written=[written])[0]
    assert best.seconds <= simulate(written, costs).seconds_per_iteration


def test_reads_fall_behind_only_where_that_is_allowed_and_the_name_says_so() -> None:
    tasks = [
        task("fetch", ["batch"], ["x"]),
        task("lookup", ["x", State("tables")], ["e"]),
        task("train", ["e"], ["g"]),
        task("update", ["g"], [State("tables")]),
    ]
    costs = {
        name: TaskCost(seconds)
        for name, seconds in zip(("fetch", "lookup", "train", "update"), (1, 4, 5, 2), strict=True)
    }
    limits = PlanLimits(3, frozenset({"fetch", "lookup"}), frozenset({"train", "update"}))
    exact = find_plans(tasks, costs, limits)
    assert exact[0].seconds == pytest.approx(11)
    assert not any(candidate.plan.stale for candidate in exact)
    loose = find_plans(tasks, costs, PlanLimits(3, limits.on_workers, limits.by_caller, allow_stale=True))
    assert loose[0].seconds == pytest.approx(7)
    assert loose[0].plan.stale == (Dependency("update", "lookup", 1),)
    assert "stale" in loose[0].plan.name


def test_the_order_of_two_writes_is_never_abandoned() -> None:
    tasks = [task("first", [State("t")], [State("t"), "x"]), task("second", ["x", State("t")], [State("t")])]
    costs = {"first": TaskCost(3.0), "second": TaskCost(4.0)}
    limits = PlanLimits(3, frozenset({"first", "second"}), allow_stale=True)
    best = find_plans(tasks, costs, limits)[0]
    assert not best.plan.stale
    assert best.seconds == pytest.approx(7)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (lambda: PlanLimits(0), "max_in_flight is 0"),
        (lambda: PlanLimits("3"), "max_in_flight is '3'; expected a whole number, 1 or more"),  # type: ignore[arg-type]
        (lambda: PlanLimits(2.5), "max_in_flight is 2.5"),  # type: ignore[arg-type]
        (lambda: PlanLimits(max_workers=-1), "max_workers is -1, expected at least 0"),
        (lambda: PlanLimits(streams={"gpu": "x"}), "resource 'gpu'"),  # type: ignore[dict-item]
        (
            lambda: PlanLimits(on_workers=frozenset({"none"})),
            "on_workers names the unknown task 'none'.*copy, exchange",
        ),
        (lambda: PlanLimits(by_caller=frozenset({"none"})), "by_caller names the unknown task 'none'"),
        (lambda: PlanLimits(submitted_before=(("copy", "none"),)), "submitted_before names the unknown task 'none'"),
        (
            lambda: PlanLimits(on_workers=frozenset({"step"}), by_caller=frozenset({"step"})),
            "'step' is in by_caller and",
        ),
        (
            lambda: PlanLimits(submitted_before=(("copy", "step"), ("step", "copy"))),
            "no plan keeps the limits.*submitted_before",
        ),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(limits: Callable[[], PlanLimits], message: str) -> None:
    tasks, costs = input_then_training()
    with pytest.raises(PlanError, match=message):
        find_plans(tasks, costs, limits())


def test_a_search_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="keep is 0, expected at least 1"):
        found(random_graph(9), keep=0)


# ---------------------------------------------------------------------- bounds


def test_the_bound_is_the_busiest_resource_the_slowest_cycle_or_a_batchs_way_by_the_depth() -> None:
    tasks, costs = input_then_training()
    assert lower_bound(tasks, costs, 5).seconds == pytest.approx(7e-3)
    assert lower_bound(tasks, costs, 1).seconds == pytest.approx(14e-3)
    assert "a batch takes 14.00 ms from its first task to its last" in lower_bound(tasks, costs, 1).reason
    assert (
        lower_bound(tasks, costs, 5, Machine(cores=0.5)).reason
        == "compute (0.5 lanes) is busy for 14.00 ms per iteration"
    )
    on_main = lower_bound(tasks, costs, 5, Machine(between_periods=1e-3), on_main=["train", "step", "exchange"])
    assert on_main.seconds == pytest.approx(13e-3)
    assert on_main.reason == "the main thread is busy for 13.00 ms per iteration"
    costs["exchange"] = TaskCost(9e-3, "network")
    assert lower_bound(tasks, costs, 5).seconds == pytest.approx(9e-3)
    costs["exchange"] = TaskCost(1e-3, "host", 6e-3, "network", "train")
    assert lower_bound(tasks, costs, 1).seconds == pytest.approx(16e-3)
    abandoned = [Dependency("step", "train", 1)]
    assert lower_bound(tasks, costs, 5, stale=abandoned).seconds == pytest.approx(6e-3)
    with pytest.raises(PlanError, match="the depth must be at least 1, got 0"):
        lower_bound(tasks, costs, 0)
    with pytest.raises(PlanError, match="on_main names the unknown task 'none'"):
        lower_bound(tasks, costs, 1, on_main=["none"])


@pytest.mark.parametrize("seed", range(40))
def test_the_slowest_cycle_is_that_of_trying_all(seed: int) -> None:
    draw = random.Random(seed)
    nodes = range(5)
    edges = []
    for _ in range(draw.randint(1, 12)):
        up, down = draw.choice(nodes), draw.choice(nodes)
        edges.append(Edge(up, down, draw.randint(0, 9), draw.randint(0 if up < down else 1, 2)))
    best = 0.0
    for length in range(1, 6):
        for around in itertools.permutations(nodes, length):
            steps = [
                [e for e in edges if (e.upstream, e.downstream) == (around[i], around[(i + 1) % length])]
                for i in range(length)
            ]
            for chosen in itertools.product(*steps):
                best = max(best, sum(e.seconds for e in chosen) / sum(e.distance for e in chosen))
    cycle = maximum_cycle_ratio(edges)
    assert (cycle.ratio if cycle else 0.0) == pytest.approx(best)
    if cycle:
        assert all(
            one.downstream == other.upstream for one, other in itertools.pairwise((*cycle.edges, cycle.edges[0]))
        )


@pytest.mark.parametrize("seed", range(30))
def test_a_modulo_schedule_keeps_dependencies_and_uses_nothing_twice_at_once(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(2, 7)
    lengths = [draw.randint(1, 6) for _ in range(count)]
    claims = [[Claim(draw.choice("abc"), 0.0, length), Claim("d", length / 2, length / 4)] for length in lengths]
    waits = [Wait(up, down, lengths[up], 0) for up in range(count) for down in range(up) if draw.random() < 0.3]
    waits = [Wait(down, up, lengths[down], 0) for up, down, _, _ in waits] + [Wait(count - 1, 0, lengths[-1], 1)]
    loop = Loop(lengths, claims, waits, "a", 0.5, frozenset({count - 1}))
    period = sum(lengths) + 1.0
    starts = modulo_schedule(loop, period, 3) or modulo_schedule(loop, period, 3, by_slack=True)
    assert starts is not None
    assert starts[-1] >= 2 * period - 1e-6
    assert all(0 <= start <= 3 * period - length + 1e-6 for start, length in zip(starts, lengths, strict=True))
    assert all(starts[down] >= starts[up] + after - distance * period - 1e-6 for up, down, after, distance in waits)
    for unit in "abcd":
        held = sorted(
            ((start + after) % period, seconds)
            for start, own in zip(starts, claims, strict=True)
            for name, after, seconds in own
            if name == unit
        )
        for (begin, seconds), (then, _) in zip(
            held, [*held[1:], (held[0][0] + period, 0.0)] if held else [], strict=True
        ):
            assert begin + seconds <= then + 1e-6
        if unit == "a":  # inside one period, after the pause
            assert all(begin >= 0.5 - 1e-6 and begin + seconds <= period + 1e-6 for begin, seconds in held)


def test_drafts_that_differ_in_names_or_in_when_a_worker_is_told_are_one() -> None:
    tasks, costs = input_then_training()
    limits = PlanLimits(3, frozenset({"copy", "exchange"}), frozenset({"step"}))
    space = PlanSpace(tasks, costs, limits, Machine())
    same = {
        space.draft([2, 1, 0, 0], threads, order)
        for threads in ([1, 2, 0, 0], [2, 1, 0, 0], [3, 1, 0, 0])
        for order in ([0, 1, 2, 3], [2, 0, 3, 1], [1, 2, 3, 0])
    }
    assert len(same) == 1
    assert space.draft([1, 2, 0, 0], [0, 0, 0, 0], range(4)) is None  # needs what is not there yet
    assert space.draft([3, 1, 0, 0], [0, 0, 0, 0], range(4)) is None  # too far ahead
    assert space.draft([1, 1, 1, 0], [0, 0, 0, 0], range(4)) is not None
    assert space.draft([1, 1, 1, 1], [0, 0, 0, 0], range(4)) is None  # the caller's step has its place


# ---------------------------------------------------------------------- the choice


def chosen(by_hand: Sequence[Sequence[float]], found: Sequence[Sequence[float]]) -> str:
    """The fastest of plans by what they took: ``hand0``, ``hand1`` ..., ``auto0`` ..."""
    hand = {f"hand{index}": times for index, times in enumerate(by_hand)}
    return fastest({**hand, **{f"auto{index}": times for index, times in enumerate(found)}}, list(hand))


def test_the_winner_is_never_slower_than_the_best_hand_written_plan() -> None:
    draw = random.Random(0)
    won = 0
    for _ in range(300):
        rounds = draw.randint(1, 12)
        speeds = [draw.choice([1.0, 1.02, 1.2]) for _ in range(draw.randint(2, 6))]
        times = [[speed + 0.05 * draw.random() for _ in range(rounds)] for speed in speeds]
        hand = draw.randint(1, len(speeds) - 1)
        winner = chosen(times[:hand], times[hand:])
        best = min(map(typical, times[:hand]))
        measured = times[int(winner[4:]) + (hand if winner.startswith("auto") else 0)]
        assert typical(measured) <= best
        if winner.startswith("auto"):
            won += 1
            assert typical(measured) < best
    assert won > 30


def test_a_plan_that_is_faster_in_every_round_wins_although_the_machine_drifts() -> None:
    drift = [1.0 + index for index in range(9)]
    by_hand = [drift, [2 * time for time in drift]]
    assert chosen(by_hand, [[0.99 * time for time in drift], [1.5 * time for time in drift]]) == "auto0"


def test_of_equals_the_hand_written_plan_is_kept() -> None:
    assert chosen([[1.0] * 9], [[1.0] * 9]) == "hand0"
    draw = random.Random(1)
    kept = [
        chosen([[draw.random() for _ in range(9)]], [[draw.random() for _ in range(9)] for _ in range(5)])
        for _ in range(200)
    ]
    assert sum(name != "hand0" for name in kept) <= 20


def test_a_plan_that_is_hardly_faster_is_not_taken() -> None:
    assert chosen([[9.0] * 9, [5.0] * 9], [[4.98] * 9]) == "hand1"
    assert chosen([[9.0] * 9, [5.0] * 9], [[4.97] * 9]) == "auto0"


def test_a_plan_that_wins_most_rounds_and_is_yet_typically_slower_is_not_chosen() -> None:
    hand = [float(index) for index in range(1, 10)]
    assert chosen([hand], [[100.0, *(time - 0.1 for time in hand[1:])]]) == "hand0"


def test_what_is_typical_is_the_mean_of_the_middle_half() -> None:
    assert typical([3.0]) == 3.0
    assert typical([1.0, 4.0]) == 2.5
    assert typical([9.0, 1.0, 2.0]) == 2.0
    assert typical([99.0, 1.0, 2.0, 4.0]) == 3.0
    assert typical([0.0, 99.0, 2.0, 4.0, 6.0, 8.0, 0.0, 99.0]) == 5.0


def left(by_hand: Sequence[Sequence[float]], found: Sequence[Sequence[float]] = ()) -> list[str]:
    """Those that go on."""
    hand = {f"hand{index}": times for index, times in enumerate(by_hand)}
    return contenders({**hand, **{f"auto{index}": times for index, times in enumerate(found)}}, list(hand))


def test_plans_that_lose_beyond_noise_drop_out_of_the_race() -> None:
    near, far = [1.0, 1.2, 1.0, 1.2, 1.0, 1.2], [2.0] * 6
    assert left([[1.1] * 6, near, far]) == ["hand0", "hand1"]
    assert left([[1.1] * 6, near], [far, [1.15, 1.05] * 3]) == ["hand0", "hand1", "auto1"]
    # Nothing written by hand drops out for a found plan, which may not be taken in the end.
    assert left([[1.1] * 6, [1.15, 1.05] * 3], [[1.0] * 6]) == ["hand0", "hand1", "auto0"]
    assert left([[1.1] * 2, far[:2]]) == ["hand0", "hand1"]  # two rounds show nothing
    assert left([[1.1] * 6, near, far[:5]]) == ["hand0", "hand1"]  # it has dropped out before


def test_the_race_ends_where_another_round_would_decide_nothing() -> None:
    assert left([[1.0] * 6]) == []
    assert left([[1.0] * 6, [2.0] * 6], [[3.0] * 6]) == []
    assert left([[1.0] * 6, [2.0] * 6], [[0.9] * 6]) == []
    # Five of six is not enough to take one of three, and too much to let it go.
    assert left([[1.0] * 6], [[0.9] * 5 + [1.1], [2.0] * 6, [2.0] * 6]) == ["hand0", "auto0"]


def test_the_race_finds_small_differences_behind_much_noise() -> None:
    def raced(draw: random.Random, speeds: Sequence[float]) -> float:
        names = [f"hand{index}" for index in range(len(speeds))]
        measured: dict[str, list[float]] = {name: [] for name in names}
        running = names
        while running and max(map(len, measured.values())) < 24:
            for name in running:
                measured[name].append(speeds[names.index(name)] * draw.gauss(1.0, 0.1))
            if max(map(len, measured.values())) >= 6:
                running = contenders(measured, names)
        return speeds[names.index(fastest(measured, names))] / min(speeds) - 1

    draw = random.Random(0)
    lost = [raced(draw, [1.0, 1.05, 1.16]) for _ in range(300)]
    assert statistics.fmean(lost) < 0.01
    assert max(lost) < 0.1


def test_a_round_that_was_disturbed_does_not_decide() -> None:
    assert chosen([[5.0] * 8], [[4.0] * 7 + [6.0]]) == "auto0"
    assert chosen([[5.0] * 8], [[4.0] * 6 + [6.0] * 2]) == "hand0"


def test_plans_that_have_dropped_out_share_in_the_level_too() -> None:
    hand, winner, loser = {"hand": [1.0] * 5}, {"auto0": [0.5] * 5}, {"auto1": [9.0] * 3}
    # Five of five is enough to take one of one, and not one of two, whichever of them is still measured.
    assert fastest({**hand, **winner}, ["hand"]) == "auto0"
    assert fastest({**hand, **winner, **loser}, ["hand"]) == "hand"


def test_few_rounds_prove_nothing_and_the_more_plans_the_less() -> None:
    assert [most_found(rounds) for rounds in range(1, 9)] == [0, 0, 0, 0, 1, 3, 6, 12]
    for rounds in range(1, 9):
        most = most_found(rounds)
        assert chosen([[1.0] * rounds], [[0.5] * rounds] * (most + 1)) == "hand0"
        if most:
            assert chosen([[1.0] * rounds], [[0.5] * rounds] * most) == "auto0"
