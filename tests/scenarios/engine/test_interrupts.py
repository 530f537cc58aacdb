"""Ctrl-C at every line of the engine that the main thread comes to: nothing hangs, nothing is left, nothing is lost."""

from __future__ import annotations

import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lightning_pipe import engine
from lightning_pipe.engine import (
    IterContext,
    PipelineError,
    PipelinePlan,
    PipelineTask,
    PlanError,
    SWPipeline,
    TaskSchedule,
)
from lightning_pipe.engine.plans.checked_context import CHECK
from tests.engine.within import within
from tests.patience import HANG

# The first one that trains in a steady state is the second.
BATCHES = 3
_FOLDER = str(Path(engine.__file__).parent)
_Run = Callable[[SWPipeline, Iterator[int]], object]


@pytest.fixture(autouse=True)
def _as_in_production(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted are the lines that run there: contexts are not checked."""
    monkeypatch.delenv(CHECK, raising=False)


class InterruptAt:
    """Raises a KeyboardInterrupt before the line of this number, of those of the engine that this thread comes to.

    Lines that say ``with`` are left out: Python comes to them again where the body has ended, and a tracing function
    that raises there has the context never left, which a signal cannot do.
    """

    def __init__(self, number: int) -> None:
        self.left = number
        self.where = ""

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if frame.f_code.co_filename.startswith(_FOLDER) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        name, number = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and not linecache.getline(name, number).lstrip().startswith("with "):
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                self.where = f"{Path(name).name}:{number}"
                raise KeyboardInterrupt
        return self._line


def _plan(trained: list[int]) -> PipelinePlan:
    """Two workers and the main thread, which submit in the global order and wait for each other; and a last task."""

    def ahead(group: str) -> TaskSchedule:
        return TaskSchedule(1, thread_group=group, globally_ordered=True)

    def step(name: str) -> Callable[[IterContext], None]:
        return lambda ctx: setattr(ctx, name, ctx.batch)

    return PipelinePlan(
        [
            (PipelineTask("copy", step("copied"), reads=["batch"], writes=["copied"]), ahead("a")),
            (PipelineTask("look_up", step("rows"), reads=["batch", "copied"], writes=["rows"]), ahead("b")),
            (
                PipelineTask("reduce", step("sums"), reads=["batch", "rows"], writes=["sums"]),
                TaskSchedule(globally_ordered=True),
            ),
            (
                PipelineTask("train", lambda ctx: trained.append(ctx.batch), reads=["batch", "sums"], writes=["out"]),
                TaskSchedule(),
            ),
        ]
    )


def _whole_periods(pipeline: SWPipeline, data: Iterator[int]) -> None:
    with suppress(StopIteration):
        while True:
            pipeline.progress(data)


def _steps(pipeline: SWPipeline, data: Iterator[int]) -> None:
    with suppress(StopIteration):
        while True:
            pipeline.begin_period(data)
            pipeline.run_until("look_up")
            ctx = pipeline.begin_caller_task("train")
            pipeline.plan.tasks["train"].fn(ctx)
            pipeline.end_caller_task("train")
            pipeline.finish_period()


def _serial_then_drained(pipeline: SWPipeline, data: Iterator[int]) -> None:
    pipeline.begin_serial_period(data)
    pipeline.finish_period()
    pipeline.progress(data)
    pipeline.drain()
    _whole_periods(pipeline, data)


def _abandoned_and_closed(pipeline: SWPipeline, data: Iterator[int]) -> None:
    pipeline.progress(data)
    pipeline.wait_for_workers()
    pipeline.abandon()
    pipeline.progress(data)
    pipeline.close()


def _interrupted(run: _Run, number: int) -> str:
    """Where line *number* is, at which the run was interrupted; nothing where it has fewer."""
    before = set(threading.enumerate())
    trained: list[int] = []
    pipeline, data = SWPipeline(_plan(trained)), iter(range(BATCHES))
    interrupt = InterruptAt(number)
    came = False
    try:
        with interrupt:
            run(pipeline, data)
    except KeyboardInterrupt:
        came = True
    assert came == bool(interrupt.where), "the interrupt was swallowed"
    if came and not pipeline.failed and run is not _abandoned_and_closed:
        # It came where a call begins: the caller can call that again.
        with suppress(PlanError):
            pipeline.end_caller_task("train")
        with suppress(PlanError):
            pipeline.finish_period()
        _whole_periods(pipeline, data)
        assert trained == list(range(BATCHES)), f"interrupted at {interrupt.where}"
    elif came and pipeline.failed:
        with pytest.raises(PipelineError):
            pipeline.progress(data)
    pipeline.abandon()
    assert pipeline.in_flight == ()
    pipeline.close()
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not left, f"interrupted at {interrupt.where}"
    return interrupt.where


@pytest.mark.parametrize("run", [_whole_periods, _steps, _serial_then_drained, _abandoned_and_closed])
def test_an_interrupt_at_any_line_ends_the_pipeline_or_changes_nothing(run: _Run) -> None:
    number = 0
    while within(HANG, lambda at=number: _interrupted(run, at), f"line {number}"):  # type: ignore[misc]
        number += 1
    assert number > 100
