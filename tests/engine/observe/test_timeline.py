"""Bars of several ranks: their lanes, the arrows between them, the critical path."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from lightning_pipe.engine.observe.timeline import DEVICE, TASK, Bar, Timeline, task_bars
from lightning_pipe.engine.observe.trace import TaskSpan
from lightning_pipe.engine.plans.dependencies import Dependency

AFTER_COPY = (Dependency("copy", "train"), Dependency("train", "copy", 2))


def task(
    name: str,
    iteration: int,
    start: float,
    end: float,
    lane: str = "main",
    rank: int = 0,
    submitted: float | None = None,
) -> Bar:
    return Bar(rank, lane, name, TASK, start, end, iteration, submitted=submitted)


def part(kind: str, stage: int, start: float, end: float, microbatch: int = 0, pipeline: int = 0) -> Bar:
    """Of a micro-batch, on the rank with the number of the stage, and of the pipeline."""
    return Bar(10 * pipeline + stage, "main", kind, kind, start, end, 3, microbatch, stage, pipeline)


def named(timeline: Timeline, pairs: object) -> set[tuple[str, str]]:
    def name(position: int) -> str:
        bar = timeline.bars[position]
        return f"{bar.name} {bar.iteration if bar.stage is None else f'{bar.microbatch} of stage {bar.stage}'}"

    assert isinstance(pairs, tuple)
    return {(name(source), name(target)) for source, target in pairs}


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
    assert [
        (timeline.bars[position].rank, timeline.bars[position].name) for position in timeline.enclosing_bar_positions
    ] == [(0, "train")]
    # Not the task itself, which would hide what it waited for; nor what was done again in the meantime.
    found = [
        timeline.bars[position] for position in sorted(timeline.critical_path, key=lambda p: timeline.bars[p].start)
    ]
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


# ---------------------------------------------------------------------- the critical path


def test_what_follows_a_schedule_waits_for_the_last_work_in_it_of_every_rank() -> None:
    bars = [part("forward", 1, 0, 2), part("backward", 1, 2, 4), part("forward", 0, 1, 2), part("backward", 0, 4, 9)]
    timeline = Timeline([*bars, task("OptimStep", 3, 9, 12, rank=1), task("OptimStep", 3, 9, 10)])
    steps = {
        (timeline.bars[s].rank, timeline.bars[t].rank, timeline.bars[t].name) for s, t in timeline.critical_path_arrows
    }
    assert (0, 1, "OptimStep") in steps


def test_the_path_waits_for_other_ranks_and_inside_tasks_that_enclose_others_by_name() -> None:
    bars = [
        task("copy", 3, 0, 1, "w", submitted=0),
        task("ScheduleStep", 3, 2, 10),
        part("forward", 0, 3, 4),
        part("backward", 0, 5, 9),
        task("OptimStep", 3, 12, 13),
        part("forward", 1, 0, 1),
    ]
    timeline = Timeline(bars, (Dependency("copy", "ScheduleStep"),))
    waits = sorted((wait.start, wait.end, wait.name) for wait in timeline.critical_waits if wait.rank == 0)
    assert waits == [
        (1, 2, "hand-off"),
        (2, 3, "in ScheduleStep"),
        (4, 5, "in ScheduleStep"),
        (9, 10, "in ScheduleStep"),
        (10, 12, "between tasks"),
    ]
    timeline = Timeline([part("forward", 0, 0, 1), part("forward", 1, 3, 4)])
    assert [(wait.rank, wait.start, wait.end, wait.name) for wait in timeline.critical_waits] == [(1, 1, 3, "transfer")]


def holes(timeline: Timeline) -> list[tuple[float, float]]:
    """Times between the first start and the last end of a path that lie neither in its bars nor in its named waits."""
    path = [timeline.bars[position] for position in timeline.critical_path]
    assert all(wait.name for wait in timeline.critical_waits)
    spans = sorted((bar.start, bar.end) for bar in (*path, *timeline.critical_waits))
    found, reached = [], spans[0][0] if spans else 0.0
    for start, end in spans:
        if start > reached:
            found.append((reached, start))
        reached = max(reached, end)
    assert not path or reached == max(bar.end for bar in path)
    return found


@st.composite
def executions(draw: st.DrawFn) -> tuple[Timeline, float]:
    """Timeline of some iterations that were run as the engine does, and the longest time without any work."""
    count = draw(st.integers(1, 6))
    groups = draw(st.lists(st.sampled_from(["main", "main", "v", "w"]), min_size=count, max_size=count))
    pairs = st.tuples(st.integers(0, count - 1), st.integers(0, count - 1), st.integers(0, 2))
    needs = [(up, down, far) for up, down, far in draw(st.lists(pairs, max_size=6)) if up < down or far]
    pause = st.integers(0, 2)
    bars: dict[tuple[int, int], Bar] = {}
    free: dict[str, float] = {"v": 0, "w": 0}
    now = 0.0
    for iteration in range(draw(st.integers(1, 4))):
        for index, group in enumerate(groups):
            now += draw(pause)
            needed = [bars[it, up].end for up, down, far in needs if down == index and (it := iteration - far) >= 0]
            begin = max([now if group == "main" else max(now, free[group]), *needed]) + draw(pause)
            end = begin + draw(st.integers(1, 100))
            submitted = None if group == "main" else now
            bars[iteration, index] = task(f"t{index}", iteration, begin, end, group, submitted=submitted)
            if group == "main":
                now = end
            else:
                free[group] = end
    dependencies = [Dependency(f"t{up}", f"t{down}", far) for up, down, far in needs]
    return Timeline(bars.values(), dependencies), 2.0 * (len(bars) + 1)


@given(executions())
def test_the_path_of_an_execution_is_without_gaps_and_begins_where_work_began(made: tuple[Timeline, float]) -> None:
    timeline, idle = made
    assert holes(timeline) == []
    assert all(wait.end - wait.start <= idle for wait in timeline.critical_waits)
    path = [timeline.bars[position] for position in timeline.critical_path]
    assert min(bar.start for bar in path) <= min(bar.start for bar in timeline.bars) + idle
    assert max(bar.end for bar in path) == max(bar.end for bar in timeline.bars)


def test_the_path_of_a_recorded_run_is_without_gaps() -> None:
    def look(ctx: IterContext) -> None:
        assert ctx.rows == ctx.iter_idx

    def read(ctx: IterContext) -> None:
        ctx.rows = ctx.batch

    plan = PipelinePlan(
        [
            (PipelineTask("read", read, reads=["batch"], writes=["rows"]), TaskSchedule(1, thread_group="reader")),
            (PipelineTask("forward", look, reads=["rows"]), TaskSchedule()),
            (PipelineTask("backward", look, reads=["rows"]), TaskSchedule()),
        ],
        order=["forward", "read", "backward"],
    )
    pipeline = SWPipeline(plan)
    try:
        batches: Any = iter(range(6))
        pipeline.fill_pipeline(batches)
        pipeline.start_trace()
        for _ in range(5):
            pipeline.progress(batches)
        bars = task_bars(pipeline.stop_trace(), 0)
    finally:
        pipeline.close()
    at = {(bar.name, bar.iteration): bar for bar in bars}
    for iteration in range(1, 4):  # the last read may still run when the trace is stopped
        submitted = at["read", iteration + 1].submitted
        assert submitted is not None
        # A thread's own clock: after the forward, before the backward.
        assert at["forward", iteration].end <= submitted <= at["backward", iteration].start
        assert submitted <= at["read", iteration + 1].start
    assert all(bar.submitted is None for bar in bars if bar.lane == "main")
    timeline = Timeline(bars, plan.dependencies)
    assert holes(timeline) == []
    assert min(timeline.bars[position].start for position in timeline.critical_path) == min(bar.start for bar in bars)
