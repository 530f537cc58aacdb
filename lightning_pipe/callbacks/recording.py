"""What one rank notes over some batches: its tasks, its stages' work on micro-batches, and its evaluations.

Tested in ``tests/callbacks/test_trace.py``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_pipe.engine import SWPipeline, TaskSpan
from lightning_pipe.engine.observe.clocks import ClockOffset
from lightning_pipe.engine.observe.timeline import BACKWARD, EVALUATION, FORWARD, RECOMPUTE, TASK, Bar, task_bars
from lightning_pipe.engine.plans.schedule import MAIN
from lightning_pipe.pipe.plans import work_of
from lightning_pipe.strategies.in_process import InProcessPipelineStrategy

if TYPE_CHECKING:
    from lightning_pipe.llm.run.runner import PipelineRunner
    from lightning_pipe.llm.schedules.timed_stage import StageEvent

__all__ = ["Recording"]

_ENDS = 5  # of batches: more are in no picture
_KINDS = {"Forward": FORWARD, "Recompute": RECOMPUTE, "Backward": BACKWARD}
_NOTHING = 5e-5  # seconds: shorter is no forward


class Recording:
    """One recording, which begins when this is made.

    Args:
        first: the batch it begins with.
        clock: how far this rank's clock is off now.
        strategy: the trainer's; if it has a runner of stages, or a pipe, their work is recorded too.
        keep: the number of tasks, and of works of stages, to keep.

    Attributes:
        first: see above.
        clock: see above.
        last: the last batch trained, once there is one.
        ends: when the latest batches were done, and before them the recording's begin (seconds of this rank's clock).
    """

    def __init__(self, first: int, clock: ClockOffset, strategy: Any, keep: int) -> None:
        self.first, self.clock = first, clock
        self.last: int | None = None
        self.ends: deque[float] = deque([time.perf_counter()], maxlen=_ENDS)
        self._keep = keep
        self._strategy = strategy
        self._runner: PipelineRunner | None = getattr(strategy, "runner", None)
        self._events: deque[StageEvent] = deque(maxlen=keep)
        self._evaluations: deque[tuple[str, float, float]] = deque(maxlen=keep)
        self._pipe = strategy.pipe if isinstance(strategy, InProcessPipelineStrategy) else None
        if self._pipe is not None:
            self._pipe.start_trace(keep)
        self._pipeline: SWPipeline | None = None
        self._offset = 0  # of the pipeline's iterations, behind which batches of the fit they are
        self._earlier: list[Bar] = []
        if self._runner is not None:
            # Somebody else may have asked for events already, and keeps them.
            self._wanted, self._taken = self._runner.record_events, len(self._runner.events)
            self._runner.record_events = True

    @property
    def of_stages(self) -> bool:
        """Whether it has stages' work on micro-batches."""
        return self._runner is not None or self._pipe is not None

    def start(self, pipeline: SWPipeline, batch: int) -> None:
        """Record the tasks of *pipeline* from now on, where *batch* of the fit is trained next."""
        self._look_at(pipeline, batch)
        pipeline.start_trace(self._keep)
        self.ends = deque([time.perf_counter()], maxlen=_ENDS)

    def follow(self, pipeline: SWPipeline, rank: int, batch: int) -> None:
        """Record another pipeline's tasks from now on, if *pipeline* is another.

        Args:
            pipeline: that trains *batch*.
            rank: this one.
            batch: of the fit, about to be trained; each pipeline counts its iterations for itself.
        """
        if pipeline is self._pipeline:
            return
        self._take_bars(rank)
        self._look_at(pipeline, batch)
        if pipeline.trace is None:
            pipeline.start_trace(self._keep)

    def _look_at(self, pipeline: SWPipeline, batch: int) -> None:
        oldest = pipeline.in_flight[0].iter_idx if pipeline.in_flight else pipeline.started
        self._pipeline, self._offset = pipeline, batch - oldest

    def batch_done(self, batch: int) -> None:
        """Note that *batch* is trained."""
        self._take_events()
        self.last = batch
        self.ends.append(time.perf_counter())

    def evaluated(self, name: str, start: float) -> None:
        """Note that an evaluation called *name*, begun at *start* (seconds), is over."""
        self._evaluations.append((name, start, time.perf_counter()))

    def stop(self, rank: int) -> list[Bar]:
        """Record no more; returns what was recorded, by this rank's clock."""
        self._take_bars(rank)
        bars, self._earlier = self._earlier, []
        if self._runner is not None:
            self._take_events()
            self._runner.record_events = self._wanted
            bars.extend(_stage_bars(self._events, bars, rank, _pipeline_index(self._strategy)))
        if self._pipe is not None:
            bars.extend(_partition_bars(self._pipe.stop_trace(), bars, rank))
        bars.extend(Bar(rank, MAIN, name, EVALUATION, start, end) for name, start, end in self._evaluations)
        return bars

    def _take_bars(self, rank: int) -> None:
        if self._pipeline is not None:
            for bar in task_bars(self._pipeline.stop_trace(), rank):
                of_fit = None if bar.iteration is None else bar.iteration + self._offset
                self._earlier.append(replace(bar, iteration=of_fit))
        self._pipeline = None

    def _take_events(self) -> None:
        if self._runner is None:
            return
        events = self._runner.events
        self._events.extend(events[self._taken :])
        if self._wanted:
            self._taken = len(events)
        else:
            del events[self._taken :]


def _stage_bars(events: Iterable[StageEvent], tasks: Sequence[Bar], rank: int, pipeline: int) -> list[Bar]:
    """Bars of micro-batches in stages, for the iteration of the task that each lies in."""
    bars = [
        Bar(
            rank,
            MAIN,
            one.kind,
            one.kind,
            one.start_ns / 1e9,
            one.end_ns / 1e9,
            None,
            one.microbatch,
            one.stage,
            pipeline,
        )
        for one in events
    ]
    return _in_iterations(bars, tasks)


def _partition_bars(spans: Iterable[TaskSpan], tasks: Sequence[Bar], rank: int) -> list[Bar]:
    """Bars of micro-batches in a pipe's partitions, for the iteration of the task that each lies in."""
    bars = []
    for span in spans:
        what, partition = work_of(span.task)
        kind = _KINDS[what]
        if kind == RECOMPUTE and span.end - span.start < _NOTHING:
            continue  # of a micro-batch whose activations were kept
        bars.append(Bar(rank, span.thread, kind, kind, span.start, span.end, None, span.iteration, partition))
    return _in_iterations(sorted(bars, key=lambda bar: bar.start), tasks)


def _in_iterations(bars: Iterable[Bar], tasks: Sequence[Bar]) -> list[Bar]:
    """*bars*, by start, each for the iteration of the main thread's task that it began in."""
    found = []
    around = deque(sorted((bar for bar in tasks if bar.kind == TASK and bar.lane == MAIN), key=lambda bar: bar.start))
    for bar in bars:
        while around and around[0].end <= bar.start:
            around.popleft()
        found.append(replace(bar, iteration=around[0].iteration if around and around[0].start <= bar.start else None))
    return found


def _pipeline_index(strategy: Any) -> int:
    """Which of the data-parallel pipelines this rank is in."""
    ranks = strategy.device_mesh.mesh.reshape(strategy.pipeline_size, -1)
    return int((ranks == dist.get_rank()).nonzero()[0, 1])
