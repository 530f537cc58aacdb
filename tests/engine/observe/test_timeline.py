"""Bars of several ranks: their lanes, the arrows between them, the critical path."""

from __future__ import annotations

from lightning_pipe.engine.observe.timeline import DEVICE, TASK, Bar, Timeline, task_bars
from lightning_pipe.engine.observe.trace import TaskSpan
from lightning_pipe.engine.plans.dependencies import Dependency

AFTER_COPY = (Dependency("copy", "train"), Dependency("train", "copy", 2))


def task(name: str, iteration: int, start: float, end: float, lane: str = "main", rank: int = 0) -> Bar:
    return Bar(rank, lane, name, TASK, start, end, iteration)


def part(kind: str, stage: int, start: float, end: float, microbatch: int = 0, pipeline: int = 0) -> Bar:
    """Of a micro-batch, on the rank with the number of the stage, and of the pipeline."""
    return Bar(10 * pipeline + stage, "main", kind, kind, start, end, 3, microbatch, stage, pipeline)


def named(timeline: Timeline, pairs: object) -> set[tuple[str, str]]:
    def name(position: int) -> str:
        bar = timeline.bars[position]
        return f"{bar.name} {bar.iteration if bar.stage is None else f'{bar.microbatch} of stage {bar.stage}'}"

    assert isinstance(pairs, tuple)
    return {(name(source), name(target)) for source, target in pairs}


def names(timeline: Timeline, positions: object) -> list[str]:
    assert isinstance(positions, frozenset)
    bars = sorted((timeline.bars[position] for position in positions), key=lambda bar: bar.end)
    return [bar.name if bar.iteration is None else f"{bar.name} {bar.iteration}" for bar in bars]


# ---------------------------------------------------------------------- bars and lanes


def test_a_span_with_times_of_the_device_is_a_bar_on_its_thread_and_one_on_its_stream() -> None:
    spans = [
        TaskSpan("copy", 1, "w", "memcpy", 1.0, 2.0, 0, 1, 1.5, 4.0),
        TaskSpan("train", 0, "main", None, 2.0, 3.0, 2, 3, 4.0, 6.0),
        TaskSpan("log", 0, "main", None, 3.0, 4.0, 4, 5),
    ]
    assert task_bars(spans, rank=2) == [
        Bar(2, "w", "copy", TASK, 1.0, 2.0, 1),
        Bar(2, "stream memcpy", "copy", DEVICE, 1.5, 4.0, 1),
        Bar(2, "main", "train", TASK, 2.0, 3.0, 0),
        Bar(2, "stream current", "train", DEVICE, 4.0, 6.0, 0),
        Bar(2, "main", "log", TASK, 3.0, 4.0, 0),
    ]


def test_lanes_are_in_order_of_ranks_and_the_main_thread_comes_first_and_streams_last() -> None:
    lanes = [(1, "w"), (0, "stream memcpy"), (0, "w"), (1, "main"), (0, "main")]
    timeline = Timeline(task("x", 0, 0, 1, lane, rank) for rank, lane in lanes)
    assert timeline.lanes == ((0, "main"), (0, "w"), (0, "stream memcpy"), (1, "main"), (1, "w"))


def test_a_bar_that_others_lie_inside_of_is_known() -> None:
    timeline = Timeline(
        [task("whole", 0, 0, 9), part("forward", 0, 0, 4), part("backward", 0, 4, 9), task("next", 0, 9, 10)]
    )
    assert [timeline.bars[position].name for position in timeline.outer] == ["whole"]


# ---------------------------------------------------------------------- arrows


def test_a_task_that_waits_for_work_on_micro_batches_in_other_threads_holds_it() -> None:
    def partition(kind: str, index: int, start: float, end: float) -> Bar:
        return Bar(0, f"partition{index}", kind, kind, start, end, 3, 0, index)

    timeline = Timeline(
        [
            task("copy", 3, 0, 1),
            task("train", 3, 1, 9),
            task("log", 3, 9, 10),
            task("train", 3, 1, 9, rank=1),
            partition("forward", 0, 2, 3),
            partition("forward", 1, 3, 4),
            partition("backward", 1, 4, 6),
            partition("recompute", 0, 4, 5),
            partition("backward", 0, 6, 8),
        ]
    )
    assert [(timeline.bars[position].rank, timeline.bars[position].name) for position in timeline.outer] == [
        (0, "train")
    ]
    # Not the task itself, which would hide what it waited for; nor what was done again in the meantime.
    found = [timeline.bars[position] for position in sorted(timeline.critical, key=lambda p: timeline.bars[p].start)]
    assert [(bar.name, bar.stage) for bar in found if bar.rank == 0] == [
        ("copy", None),
        ("forward", 0),
        ("forward", 1),
        ("backward", 1),
        ("backward", 0),
        ("log", None),
    ]
    recomputed = next(pair for pair in timeline.arrows if timeline.bars[pair[0]].kind == "recompute")
    assert timeline.bars[recomputed[1]].name == "backward"


def test_arrows_follow_the_plan_inside_a_rank_and_across_iterations() -> None:
    bars = [task("copy", 2, 2, 3), task("train", 2, 3, 4), task("train", 0, 0, 1), task("train", 0, 0, 1, rank=1)]
    timeline = Timeline(bars, AFTER_COPY)
    assert named(timeline, timeline.arrows) == {("copy 2", "train 2"), ("train 0", "copy 2")}
    assert all(timeline.bars[source].rank == timeline.bars[target].rank == 0 for source, target in timeline.arrows)


def test_micro_batches_arrows_go_forward_through_the_stages_and_back() -> None:
    timeline = Timeline(
        [
            part("forward", 0, 0, 1),
            part("wait_forward", 1, 0, 1),
            part("forward", 1, 1, 2),
            part("input_backward", 1, 2, 3),
            part("weight_backward", 1, 3, 4),
            part("backward", 0, 3, 5),
        ]
    )
    assert named(timeline, timeline.arrows) == {
        ("forward 0 of stage 0", "forward 0 of stage 1"),
        ("forward 0 of stage 1", "input_backward 0 of stage 1"),
        ("input_backward 0 of stage 1", "weight_backward 0 of stage 1"),
        ("input_backward 0 of stage 1", "backward 0 of stage 0"),
        ("forward 0 of stage 0", "backward 0 of stage 0"),
    }


def test_arrows_lead_to_the_first_turn_of_work_and_from_its_last() -> None:
    turns = [part("forward", 1, 1, 2), part("forward", 1, 3, 4)]
    timeline = Timeline([part("forward", 0, 0, 1), *turns, part("forward", 2, 4, 5)])
    found = [(timeline.bars[source].start, timeline.bars[target].start) for source, target in timeline.arrows]
    assert sorted(found) == [(0, 1), (3, 4)]


def test_micro_batches_of_other_pipelines_have_nothing_to_do_with_each_other() -> None:
    timeline = Timeline([part("forward", 0, 0, 1), part("forward", 1, 1, 2, pipeline=1)])
    assert timeline.arrows == ()


# ---------------------------------------------------------------------- the critical path


def test_the_path_goes_through_the_worker_where_the_main_thread_waits_for_it() -> None:
    bars = [
        task("copy", 1, 0, 6, "w"),
        task("other", 0, 0, 2),
        task("train", 1, 6, 8),
        task("aside", 1, 1, 7, "v"),
    ]
    timeline = Timeline(bars, AFTER_COPY)
    assert names(timeline, timeline.critical) == ["copy 1", "train 1"]
    assert named(timeline, timeline.critical_steps) == {("copy 1", "train 1")}


def test_the_path_stays_on_the_main_thread_where_the_worker_is_done_in_time() -> None:
    bars = [task("copy", 1, 0, 1, "w"), task("other", 0, 0, 2), task("train", 1, 2, 8)]
    assert names(Timeline(bars, AFTER_COPY), Timeline(bars, AFTER_COPY).critical) == ["other 0", "train 1"]


def test_ranks_without_arrows_between_them_have_a_path_each() -> None:
    bars = [task("train", 1, 0, 8), task("train", 1, 0, 2, rank=1)]
    assert names(Timeline(bars), Timeline(bars).critical) == ["train 1", "train 1"]


def test_a_pipelines_path_changes_ranks_and_leaves_out_waits_and_what_holds_the_micro_batches() -> None:
    timeline = Timeline(
        [
            task("ScheduleStep", 3, 0, 9),
            task("ScheduleStep", 3, 0, 9, rank=1),
            part("forward", 0, 0, 2),
            part("wait_forward", 1, 0, 2),
            part("forward", 1, 2, 4),
            part("backward", 1, 4, 5),
            part("wait_backward", 0, 2, 5),
            part("backward", 0, 5, 9),
        ]
    )
    assert names(timeline, timeline.critical) == ["forward 3", "forward 3", "backward 3", "backward 3"]
    assert len(timeline.critical_steps) == 3


def test_what_follows_a_schedule_waits_for_the_last_work_in_it_of_every_rank() -> None:
    bars = [part("forward", 1, 0, 2), part("backward", 1, 2, 4), part("forward", 0, 1, 2), part("backward", 0, 4, 9)]
    timeline = Timeline([*bars, task("OptimStep", 3, 9, 12, rank=1), task("OptimStep", 3, 9, 10)])
    steps = {(timeline.bars[s].rank, timeline.bars[t].rank, timeline.bars[t].name) for s, t in timeline.critical_steps}
    assert (0, 1, "OptimStep") in steps


def test_bars_without_length_do_not_hold_the_search_up() -> None:
    bars = [task("a", 0, 1, 1), task("b", 0, 1, 1), task("c", 0, 1, 1, "w")]
    deps = (Dependency("a", "c"), Dependency("c", "b"))
    assert Timeline(bars, deps).critical
    assert Timeline([]).critical == frozenset()
