"""Periods: what each call trains, from the first batch to the last, and in steps."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from lightning_pipe.engine import (
    IterContext,
    PipelinePlan,
    PipelineTask,
    PlanError,
    SWPipeline,
    TaskSchedule,
)
from tests.distributed import run_ranks
from tests.engine.within import within
from tests.patience import HANG

Log = list[tuple[str, int]]


def make_plan(log: Log, *, workers: bool = False, ahead: int = 2, **arguments: Any) -> PipelinePlan:
    """Copy at stage *ahead*, input at half of that, forward and step at 0."""

    def note(name: str) -> Callable[[IterContext], None]:
        def fn(ctx: IterContext) -> None:
            log.append((name, ctx.iter_idx))
            setattr(ctx, name, ctx.batch)

        return fn

    group = "w" if workers else "main"
    return PipelinePlan(
        [
            (PipelineTask("copy", note("copy"), reads=["batch"], writes=["copy"]), TaskSchedule(ahead)),
            (
                PipelineTask("input", note("input"), reads=["batch", "copy"], writes=["input"]),
                TaskSchedule(ahead // 2, thread_group=group),
            ),
            (PipelineTask("forward", note("forward"), reads=["batch", "input"], writes=["forward"]), TaskSchedule()),
            (PipelineTask("step", note("step"), reads=["batch", "forward"], writes=["step"]), TaskSchedule()),
        ],
        **arguments,
    )


def train(pipeline: SWPipeline, data: Iterator[Any]) -> list[Any]:
    """The batches trained until the data ends."""
    batches = []
    while True:
        try:
            batches.append(pipeline.progress(data).batch)
        except StopIteration:
            return batches


@pytest.fixture(params=[False, True], ids=["main", "workers"])
def workers(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_every_batch_is_trained_once_and_in_order_however_few_there_are(count: int, workers: bool) -> None:
    log: Log = []
    with SWPipeline(make_plan(log, workers=workers)) as pipeline:
        assert train(pipeline, iter(range(count))) == list(range(count))
    for name in ("copy", "input", "forward", "step"):
        assert [work for work in log if work[0] == name] == [(name, index) for index in range(count)]


def test_a_period_runs_each_task_for_the_iteration_its_stage_is_ahead() -> None:
    log: Log = []
    with SWPipeline(make_plan(log)) as pipeline:
        data = iter(range(9))
        pipeline.fill_pipeline(data)
        assert log == [("copy", 0), ("copy", 1), ("input", 0)]
        pipeline.fill_pipeline(data)  # a second time does nothing
        log.clear()
        assert pipeline.progress(data).iter_idx == 0
        assert log == [("copy", 2), ("input", 1), ("forward", 0), ("step", 0)]


def test_fetching_from_empty_data_stops_at_once() -> None:
    with SWPipeline(make_plan([])) as pipeline:
        for call in (pipeline.fill_pipeline, pipeline.begin_period, pipeline.begin_serial_period, pipeline.progress):
            with pytest.raises(StopIteration):
                call(iter(()))
        assert train(pipeline, iter([7])) == [7]


@pytest.mark.parametrize("left", [0, 2])
def test_a_second_iterator_after_one_that_has_ended_runs_all_stages(left: int, workers: bool) -> None:
    """With *left* batches still in flight; those of the second start when they are trained."""
    log: Log = []
    with SWPipeline(make_plan(log, workers=workers)) as pipeline:
        first, second = iter("abcd"), iter("xyz")
        trained = [pipeline.progress(first).batch for _ in range(4 - left)]
        assert trained + train(pipeline, second) == list("abcdxyz")
    for name in ("copy", "input", "forward", "step"):
        assert [work for work in log if work[0] == name] == [(name, index) for index in range(7)]


def test_draining_trains_what_is_in_flight_and_the_same_data_can_go_on(workers: bool) -> None:
    with SWPipeline(make_plan([], workers=workers)) as pipeline:
        data = iter("abcdef")
        assert pipeline.progress(data).batch == "a"
        assert [ctx.batch for ctx in pipeline.drain()] == ["b", "c"]
        assert pipeline.drain() == []
        assert train(pipeline, data) == ["d", "e", "f"]


def test_abandoned_batches_are_not_trained_and_the_pipeline_goes_on(workers: bool) -> None:
    log: Log = []
    with SWPipeline(make_plan(log, workers=workers)) as pipeline:
        data = iter("abcdefgh")
        pipeline.progress(data)
        assert pipeline.abandon() == 2
        assert pipeline.in_flight == ()
        assert pipeline.abandon() == 0
        assert pipeline.begin_period(data).batch == "d"
        pipeline.run_until("forward")
        assert pipeline.abandon() == 3
        assert train(pipeline, data) == ["g", "h"]
    assert [work for work in log if work[0] == "step"] == [("step", index) for index in (0, 6, 7)]


def test_serial_iterations_run_in_the_calling_thread_in_serial_order(workers: bool) -> None:
    log: Log = []
    with SWPipeline(make_plan(log, workers=workers)) as pipeline:
        data = iter("abcdef")
        assert pipeline.begin_serial_period(data).batch == "a"
        pipeline.run_until("input")
        assert log == [("copy", 0), ("input", 0)]
        assert pipeline.finish_period().iter_idx == 0
        assert pipeline.run_one_serial_iter("s").iter_idx == 1
        assert pipeline.run_one_serial_iter("t", idx=10).iter_idx == 10
        ctx = pipeline.progress(data)
        assert (ctx.batch, ctx.iter_idx) == ("b", 11)
        with pytest.raises(PlanError, match=r"2 batches in flight.*call drain\(\) first"):
            pipeline.begin_serial_period(data)
        with pytest.raises(PlanError, match="2 batches in flight"):
            pipeline.run_one_serial_iter("u")
        pipeline.drain()
        assert pipeline.run_one_serial_iter("u").iter_idx == 14


class Batch:
    """Something that a weak reference can watch."""


@pytest.mark.parametrize("serial", [False, True])
def test_the_memory_of_a_retired_iteration_is_freed(workers: bool, serial: bool) -> None:
    references: list[weakref.ref[Batch]] = []

    def fetch() -> Batch:
        batch = Batch()
        references.append(weakref.ref(batch))
        return batch

    gc.collect()
    gc.disable()  # by reference counts alone, at once
    try:
        with SWPipeline(make_plan([], workers=workers)) as pipeline:
            iterator = iter(fetch, None)  # no generator: it would hold the batch it gave last
            for index in range(6):
                if serial:
                    pipeline.run_one_serial_iter(next(iterator))
                else:
                    pipeline.progress(iterator)
                assert references[index]() is None
                assert sum(reference() is not None for reference in references) <= 3
    finally:
        gc.enable()


# ---------------------------------------------------------------------- in steps


def test_running_until_a_task_runs_all_before_it_and_nothing_twice(workers: bool) -> None:
    log: Log = []
    with SWPipeline(make_plan(log, workers=workers, ahead=0)) as pipeline:
        data = iter(range(2))
        assert pipeline.begin_period(data).iter_idx == 0
        pipeline.run_until("forward")
        assert log == [("copy", 0), ("input", 0), ("forward", 0)]
        pipeline.run_until("copy")
        pipeline.run_until("forward")
        assert len(log) == 3
        assert pipeline.finish_period().iter_idx == 0
        assert log[3:] == [("step", 0)]


def test_a_task_that_the_caller_runs_is_not_run_by_the_engine(workers: bool) -> None:
    log: Log = []
    with SWPipeline(make_plan(log, workers=workers, ahead=0)) as pipeline:
        pipeline.start_trace()
        pipeline.begin_period(iter([0]))
        ctx = pipeline.begin_caller_task("forward")
        assert log == [("copy", 0), ("input", 0)]
        assert ctx.input == 0
        ctx.forward = "by hand"
        pipeline.end_caller_task("forward")
        pipeline.finish_period()
        assert log == [("copy", 0), ("input", 0), ("step", 0)]
        spans = {span.task: span for span in pipeline.stop_trace()}
        assert spans["input"].end_order < spans["forward"].start_order < spans["step"].start_order


def test_a_task_that_the_caller_begins_waits_for_the_worker_it_depends_on() -> None:
    free = threading.Event()

    def wait(ctx: IterContext) -> None:
        free.wait()

    plan = PipelinePlan(
        [
            (PipelineTask("w", wait, writes=["x"]), TaskSchedule(thread_group="w")),
            (PipelineTask("between", lambda ctx: free.set()), TaskSchedule()),
            (PipelineTask("mine", lambda ctx: None, reads=["x"]), TaskSchedule()),
        ]
    )

    def run() -> int:
        with SWPipeline(plan) as pipeline:
            pipeline.start_trace()
            pipeline.begin_period(iter([0]))
            pipeline.begin_caller_task("mine")
            pipeline.end_caller_task("mine")
            pipeline.finish_period()
            spans = {span.task: span for span in pipeline.stop_trace()}
            assert spans["w"].end_order < spans["mine"].start_order
            return len(spans)

    assert within(HANG, run) == 3


@pytest.mark.parametrize(
    "where",
    [
        TaskSchedule(1),
        TaskSchedule(thread_group="w"),
        TaskSchedule(stream="copy"),
    ],
)
def test_a_task_that_needs_the_engine_cannot_be_run_by_the_caller(where: TaskSchedule) -> None:
    with SWPipeline(PipelinePlan([(PipelineTask("a", lambda ctx: None), where)])) as pipeline:
        pipeline.begin_period(iter(range(3)))
        with pytest.raises(PlanError, match=r"task 'a' is scheduled as .* can be run by the caller"):
            pipeline.begin_caller_task("a")


def two_in_turn(log: list[str]) -> PipelinePlan:
    """The caller runs the first of two tasks in one order, and a worker the second."""
    first = PipelineTask("mine", lambda ctx: None)
    second = PipelineTask("w", lambda ctx: log.append(f"w {ctx.iter_idx}"))
    ordered = TaskSchedule(globally_ordered=True)
    return PipelinePlan([(first, ordered), (second, TaskSchedule(thread_group="w", globally_ordered=True))])


def test_a_globally_ordered_task_of_the_caller_holds_its_turn_until_it_ends() -> None:
    log: list[str] = []

    def run() -> None:
        with SWPipeline(two_in_turn(log)) as pipeline:
            for iteration in range(3):
                pipeline.begin_period(iter([0]))
                pipeline.begin_caller_task("mine")
                log.append(f"mine {iteration}")
                pipeline.end_caller_task("mine")
                pipeline.finish_period()

    within(HANG, run)
    assert log == [f"{who} {iteration}" for iteration in range(3) for who in ("mine", "w")]


def test_waiting_for_a_task_that_ran_ahead_in_a_worker() -> None:
    free = threading.Event()
    copied: list[int] = []

    def copy(ctx: IterContext) -> None:
        free.wait(HANG)
        copied.append(ctx.iter_idx)

    copying = PipelineTask("copy", copy, writes=["x"])
    plan = PipelinePlan(
        [(copying, TaskSchedule(1, thread_group="w")), (PipelineTask("train", lambda ctx: None), TaskSchedule())]
    )

    def run() -> None:
        with SWPipeline(plan) as pipeline:
            pipeline.begin_period(iter(range(3)))
            assert copied == []
            free.set()
            pipeline.wait_for("copy")
            assert copied[0] == 0
            pipeline.finish_period()

    within(HANG, run)


def test_a_task_that_was_not_submitted_cannot_be_waited_for() -> None:
    with SWPipeline(two_in_turn([])) as pipeline:
        pipeline.begin_period(iter(range(3)))
        with pytest.raises(PlanError, match=r"task 'w' of iteration 0 has not been submitted yet; call run_until"):
            pipeline.wait_for("w")
        pipeline.finish_period()
        with pytest.raises(PlanError, match="no period is open"):
            pipeline.wait_for("w")


# ---------------------------------------------------------------------- misuse


def test_calls_that_do_not_fit_the_state_of_the_period_are_refused() -> None:
    with SWPipeline(make_plan([])) as pipeline:
        data = iter(range(9))
        with pytest.raises(PlanError, match=r"no period is open; call begin_period\(data_iter\) first"):
            pipeline.run_until("step")
        pipeline.begin_period(data)
        with pytest.raises(PlanError, match=r"period of iteration 0 is open; call finish_period\(\)"):
            pipeline.progress(data)
        assert pipeline.finish_period().iter_idx == 0
        assert pipeline.progress(data).iter_idx == 1


def test_a_task_begun_must_be_ended_before_anything_else() -> None:
    with SWPipeline(make_plan([])) as pipeline:
        pipeline.begin_period(iter(range(9)))
        with pytest.raises(PlanError, match="'step' was not begun"):
            pipeline.end_caller_task("step")
        pipeline.begin_caller_task("forward")
        for call in (
            lambda: pipeline.run_until("step"),
            lambda: pipeline.begin_caller_task("forward"),
            lambda: pipeline.finish_period(),
        ):
            with pytest.raises(
                PlanError, match=r"task 'forward' of iteration 0 has begun; call end_caller_task\('forward'\)"
            ):
                call()
        with pytest.raises(PlanError, match="'step' was not begun"):
            pipeline.end_caller_task("step")
        pipeline.end_caller_task("forward")
        with pytest.raises(PlanError, match="task 'forward' of iteration 0 has run already"):
            pipeline.begin_caller_task("forward")
        assert pipeline.finish_period().iter_idx == 0


# ---------------------------------------------------------------------- trace and end


def test_no_thread_outlives_close_and_a_closed_pipeline_says_so() -> None:
    pipeline = SWPipeline(make_plan([], workers=True))
    pipeline.begin_period(iter(range(9)))
    pipeline.close()
    pipeline.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lightning_pipe-")]
    assert pipeline.in_flight == ()
    with pytest.raises(PlanError, match="pipeline 'plan' is closed; build a new one"):
        pipeline.progress(iter([1]))
    with pytest.raises(PlanError, match="pipeline 'plan' is closed"):
        pipeline.finish_period()


def test_a_pipeline_that_is_forgotten_leaves_no_thread() -> None:
    pipeline = SWPipeline(make_plan([], workers=True))
    pipeline.progress(iter(range(3)))
    (thread,) = [thread for thread in threading.enumerate() if thread.name.startswith("lightning_pipe-")]
    del pipeline
    gc.collect()
    within(HANG, thread.join)


def different_plans(rank: int, world_size: int) -> str:
    with SWPipeline(make_plan([], ahead=2 * rank), group=dist.group.WORLD) as pipeline:
        try:
            pipeline.progress(iter([0] if rank == 0 else []))
        except PlanError as error:
            return str(error)
    return ""


def test_plans_that_differ_are_an_error_on_every_rank_also_on_one_without_data() -> None:
    first, second = run_ranks(different_plans, 2)
    assert "the plan differs between ranks: rank 0 has 'pipeline_depth' = '1', but rank 1 has" in first
    assert second == first
