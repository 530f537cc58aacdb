"""The meter of the calling thread's time, by a clock that moves only where the test says."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, SWPipeline, TaskSchedule
from lightning_pipe.engine.observe.meter import CallerTimeMeter
from tests.patience import HANG


class Clock:
    """In the place of ``time.perf_counter``; *waits* is set where the main thread reads it before it waits."""

    def __init__(self) -> None:
        self.now = 100.0
        self.reads = 0
        self.waits = threading.Event()

    def __call__(self) -> float:
        if threading.current_thread() is threading.main_thread():
            self.reads -= 1
            if self.reads == 0:
                self.waits.set()
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "perf_counter", found)
    return found


def test_it_tells_fetching_tasks_and_waits_for_workers_apart(clock: Clock) -> None:
    def batches() -> Iterator[int]:
        for number in itertools.count():
            clock.now += 1
            yield number

    def begin(ctx: IterContext) -> None:
        clock.now += 2
        ctx.begun = True
        clock.waits.clear()
        clock.reads = 2  # behind this task, and before the wait

    def work(ctx: IterContext) -> None:
        assert clock.waits.wait(HANG)
        clock.now += 3
        ctx.worked = True

    def end(ctx: IterContext) -> None:
        clock.now += 4

    tasks = [
        (PipelineTask("Begin", begin, writes=("begun",)), TaskSchedule()),
        (PipelineTask("Work", work, reads=("begun",), writes=("worked",)), TaskSchedule(thread_group="worker")),
        (PipelineTask("End", end, reads=("worked",)), TaskSchedule()),
    ]
    source = batches()
    with SWPipeline(PipelinePlan(tasks)) as pipeline:
        pipeline.meter = meter = CallerTimeMeter()
        for _ in range(3):
            pipeline.progress(source)
    assert (meter.fetching, meter.waiting) == (3.0, 9.0)
    assert meter.tasks == {"Begin": 6.0, "End": 12.0}
