"""One task's run: its thread, its stream, its waits, its failure."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch

from lightning_pipe.engine import (
    IterContext,
    PipelinePlan,
    PipelineTask,
    SWPipeline,
    TaskError,
    TaskSchedule,
)
from lightning_pipe.engine.runtime.sequencer import end_submission_turn
from tests.engine.fake_device import fake_device
from tests.engine.within import within
from tests.patience import HANG

Function = Callable[[IterContext], None]


def nothing(ctx: IterContext) -> None:
    pass


def chain(*steps: tuple[str, Function, TaskSchedule]) -> PipelinePlan:
    """A plan whose tasks each read what the one before wrote."""
    return PipelinePlan(
        [
            (PipelineTask(name, fn, reads=[f"out{index}"], writes=[f"out{index + 1}"]), where)
            for index, (name, fn, where) in enumerate(steps)
        ]
    )


def train(pipeline: SWPipeline, data: Iterator[int]) -> None:
    """Until the data ends."""
    with suppress(StopIteration):
        while True:
            pipeline.progress(data)


def worker_names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_pipe-")]


# ---------------------------------------------------------------------- threads


def test_a_task_on_a_worker_sees_the_settings_of_the_thread_that_submitted_it() -> None:
    seen: list[tuple[bool, str]] = []
    plan = chain(
        (
            "w",
            lambda ctx: seen.append((torch.is_grad_enabled(), torch.empty(1).device.type)),
            TaskSchedule(thread_group="w"),
        )
    )
    with SWPipeline(plan) as pipeline:
        data = iter(range(3))
        pipeline.progress(data)
        with torch.no_grad(), torch.device("meta"):
            pipeline.progress(data)
        pipeline.progress(data)
    assert seen == [(True, "cpu"), (False, "meta"), (True, "cpu")]


# ---------------------------------------------------------------------- two-phase order


@pytest.mark.parametrize("group", ["main", "w"])
def test_a_task_without_a_stream_runs_on_the_stream_current_where_it_was_submitted(group: str) -> None:
    with fake_device() as device:
        plan = chain(("a", lambda ctx: device.launch(("a", ctx.iter_idx)), TaskSchedule(thread_group=group)))
        mine = device.Stream()
        with SWPipeline(plan, device="cuda") as pipeline, device.stream(mine):
            pipeline.progress(iter([0]))
        assert device.ran_on["a", 0] is mine


@pytest.mark.parametrize("group", ["main", "w"])
def test_what_was_retired_comes_before_what_the_caller_launches_next(group: str) -> None:
    with fake_device() as device:
        launched = threading.Event()

        def launch(ctx: IterContext) -> None:
            device.launch(("a", ctx.iter_idx))
            if ctx.iter_idx == 1:
                launched.set()

        plan = chain(("a", launch, TaskSchedule(stage=1, stream="copy", thread_group=group)))
        with SWPipeline(plan, device="cuda") as pipeline:
            data = iter(range(3))
            pipeline.progress(data)
            assert ("a", 0) in device.default.before
            # The batch that is still in flight is not waited for, though a worker thread may have launched it already.
            assert launched.wait(HANG)
            assert ("a", 1) not in device.default.before
            assert ("a", 1) in device.ran_after


# ---------------------------------------------------------------------- global order


def test_a_task_that_says_it_has_submitted_lets_the_next_submit_while_it_still_waits() -> None:
    log: list[str] = []
    second_has_submitted = threading.Event()

    def first(ctx: IterContext) -> None:
        log.append("first submits")
        end_submission_turn()
        second_has_submitted.wait()
        log.append("first has waited")

    def second(ctx: IterContext) -> None:
        log.append("second submits")
        second_has_submitted.set()

    plan = PipelinePlan(
        [
            (PipelineTask("first", first), TaskSchedule(thread_group="w", globally_ordered=True)),
            (PipelineTask("second", second), TaskSchedule(globally_ordered=True)),
        ]
    )

    def run() -> None:
        with SWPipeline(plan) as pipeline:
            pipeline.progress(iter([0]))

    within(HANG, run)
    assert log == ["first submits", "second submits", "first has waited"]


# ---------------------------------------------------------------------- failure


def fail_at(iteration: int) -> Function:
    def fn(ctx: IterContext) -> None:
        if ctx.iter_idx == iteration:
            raise ValueError("broken row")

    return fn


@pytest.mark.parametrize(("stage", "group", "ordered"), [(0, "main", True), (1, "w1", False), (0, "w2", True)])
def test_a_failing_task_is_raised_in_the_main_thread_with_where_and_why(stage: int, group: str, ordered: bool) -> None:
    trained: list[int] = []
    plan = chain(
        ("copy", nothing, TaskSchedule(1, thread_group="w1", globally_ordered=ordered)),
        ("bad", fail_at(2), TaskSchedule(stage, thread_group=group, globally_ordered=ordered)),
        ("other", nothing, TaskSchedule(0, thread_group="w2", globally_ordered=ordered)),
        ("train", lambda ctx: trained.append(ctx.iter_idx), TaskSchedule(globally_ordered=ordered)),
    )

    def run() -> None:
        with SWPipeline(plan) as pipeline:
            data = iter(range(100))
            with pytest.raises(TaskError) as caught:
                train(pipeline, data)
            error = caught.value
            assert (error.task, error.iteration, error.stage, error.rank) == ("bad", 2, stage, 0)
            assert "task 'bad' of iteration 2" in str(error)
            assert isinstance(error.__cause__, ValueError)
            with pytest.raises(TaskError, match="broken row"):
                pipeline.progress(data)
            pipeline.abandon()
            with pytest.raises(TaskError, match="broken row"):
                pipeline.run_one_serial_iter(0)

    within(HANG, run)
    assert trained == list(range(len(trained)))
    assert len(trained) <= 2  # the batch that failed is not trained
    assert worker_names() == []


@pytest.mark.parametrize("group", ["main", "w2"])
@pytest.mark.parametrize("ordered", [False, True])
def test_a_task_that_depends_on_one_that_fails_does_not_run(group: str, ordered: bool) -> None:
    """Because of a field, or because its turn in the common order comes after."""
    ran: list[str] = []
    where = [TaskSchedule(thread_group=one, globally_ordered=ordered) for one in ("w1", group)]
    plan = PipelinePlan(
        [
            (PipelineTask("bad", fail_at(0), writes=[] if ordered else ["x"]), where[0]),
            (PipelineTask("next", lambda ctx: ran.append("next"), reads=[] if ordered else ["x"]), where[1]),
        ]
    )

    def run() -> None:
        with SWPipeline(plan) as pipeline, pytest.raises(TaskError, match="task 'bad'"):
            pipeline.progress(iter([0]))

    within(HANG, run)
    assert ran == []


def test_tasks_of_workers_that_were_submitted_before_a_failure_elsewhere_still_run() -> None:
    """Other ranks have submitted them too, and wait for their collectives."""
    failed = threading.Event()
    ran: list[str] = []

    def waits(ctx: IterContext) -> None:
        failed.wait(HANG)

    def bad(ctx: IterContext) -> None:
        raise ValueError("broken row")

    plan = PipelinePlan(
        [
            (PipelineTask("waits", waits), TaskSchedule(thread_group="w")),
            (PipelineTask("sends", lambda ctx: ran.append("sends")), TaskSchedule(thread_group="w")),
            (PipelineTask("bad", bad), TaskSchedule()),
        ]
    )

    def run() -> None:
        with SWPipeline(plan) as pipeline:
            with pytest.raises(TaskError, match="broken row"):
                pipeline.progress(iter([0]))
            failed.set()

    within(HANG, run)
    assert ran == ["sends"]


@pytest.mark.parametrize(("good", "stage"), [(0, 2), (4, 0)])
def test_a_failing_data_iterator_is_raised_with_the_iteration_it_was_to_feed(good: int, stage: int) -> None:
    def data() -> Iterator[int]:
        yield from range(good)
        raise OSError("disk gone")

    plan = chain(("copy", nothing, TaskSchedule(stage, thread_group="w")), ("train", nothing, TaskSchedule()))

    def run() -> None:
        with SWPipeline(plan) as pipeline:
            iterator = data()
            with pytest.raises(TaskError, match=r"'data iterator'.*disk gone") as caught:
                train(pipeline, iterator)
            assert (caught.value.iteration, caught.value.stage) == (good, stage)
            assert isinstance(caught.value.__cause__, OSError)

    within(HANG, run)
    assert worker_names() == []


def test_an_interrupt_while_the_main_thread_waits_for_a_worker_leaves_nothing_behind() -> None:
    plan = chain(
        ("slow", lambda ctx: _thread.interrupt_main(), TaskSchedule(thread_group="w")),
        ("train", nothing, TaskSchedule()),
    )
    # A shell's background jobs ignore the signal, and Python then leaves it so.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), SWPipeline(plan) as pipeline:
            train(pipeline, iter(range(100_000)))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert worker_names() == []


# ---------------------------------------------------------------------- memory


def test_a_task_comes_after_the_one_of_an_earlier_iteration_and_not_after_one_that_took_its_place() -> None:
    """Iteration i + 1 begins before i is trained, whose task comes after one of i - 1: three have to be told apart."""
    with fake_device() as device:

        def launch(name: str) -> Function:
            return lambda ctx: device.launch((name, ctx.iter_idx))

        plan = PipelinePlan(
            [
                (PipelineTask("up", launch("up")), TaskSchedule(1, "a")),
                (PipelineTask("down", launch("down")), TaskSchedule(0, "b")),
            ],
            cross_iter_deps=[("up", "down", 1)],
        )
        with SWPipeline(plan, device="cuda") as pipeline:
            train(pipeline, iter(range(6)))
        for index in range(6):
            upstream = {work for work in device.ran_after["down", index] if work[0] == "up"}
            assert upstream == {("up", earlier) for earlier in range(index)}


def test_a_task_waits_for_a_worker_at_an_earlier_iteration() -> None:
    ran = [threading.Event() for _ in range(5)]
    too_early: list[bool] = []
    plan = PipelinePlan(
        [
            # Time for the other to run, if it did not wait: more of it makes no difference otherwise.
            (
                PipelineTask("up", lambda ctx: too_early.append(ran[ctx.iter_idx + 1].wait(0.1))),
                TaskSchedule(0, None, "w"),
            ),
            (PipelineTask("down", lambda ctx: ran[ctx.iter_idx].set()), TaskSchedule(1)),
        ],
        cross_iter_deps=[("up", "down", 1)],
        order=["up", "down"],
    )
    with SWPipeline(plan) as pipeline:
        train(pipeline, iter(range(4)))
    assert too_early == [False] * 4
    assert [one.is_set() for one in ran] == [True] * 4 + [False]
