"""What one rank notes over some batches: its tasks, its stages' work on micro-batches, and its evaluations."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_pipe.engine import SWPipeline
from lightning_pipe.engine.clocks import ClockOffset
from lightning_pipe.engine.plan import MAIN
from lightning_pipe.engine.timeline import EVALUATION, TASK, Bar, task_bars

if TYPE_CHECKING:
    from lightning_pipe.llm.runner import PipelineRunner
    from lightning_pipe.llm.timed_stage import StageEvent

__all__ = ["Recording"]

_ENDS = 5  # of batches: more are in no picture


class Recording:
    """One recording, which begins when this is made.

    Args:
        first: the batch it begins with.
        clock: how far this rank's clock is off now.
        strategy: the trainer's; if it has a runner of stages, their work is recorded too.
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
        if self._runner is not None:
            # Somebody else may have asked for events already, and keeps them.
            self._wanted, self._taken = self._runner.record_events, len(self._runner.events)
            self._runner.record_events = True

    @property
    def of_stages(self) -> bool:
        """Whether it has stages' work on micro-batches."""
        return self._runner is not None

    def start(self, pipeline: SWPipeline) -> None:
        """Record the tasks of *pipeline* from now on."""
        pipeline.start_trace(self._keep)
        self.ends = deque([time.perf_counter()], maxlen=_ENDS)

    def batch_done(self, batch: int) -> None:
        """Note that *batch* is trained."""
        self._take_events()
        self.last = batch
        self.ends.append(time.perf_counter())

    def evaluated(self, name: str, start: float) -> None:
        """Note that an evaluation called *name*, begun at *start* (seconds), is over."""
        self._evaluations.append((name, start, time.perf_counter()))

    def stop(self, pipeline: SWPipeline | None, rank: int) -> list[Bar]:
        """Record no more; returns what was recorded, by this rank's clock."""
        bars = [] if pipeline is None else task_bars(pipeline.stop_trace(), rank)
        if self._runner is not None:
            self._take_events()
            self._runner.record_events = self._wanted
            bars.extend(_stage_bars(self._events, bars, rank, _pipeline_index(self._strategy)))
        bars.extend(Bar(rank, MAIN, name, EVALUATION, start, end) for name, start, end in self._evaluations)
        return bars

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
    """Bars of micro-batches, for the iteration of the task that each lies in."""
    bars = []
    around = deque(sorted((bar for bar in tasks if bar.kind == TASK and bar.lane == MAIN), key=lambda bar: bar.start))
    for event in events:
        start, end = event.start_ns / 1e9, event.end_ns / 1e9
        while around and around[0].end <= start:
            around.popleft()
        iteration = around[0].iteration if around and around[0].start <= start else None
        bars.append(
            Bar(rank, MAIN, event.kind, event.kind, start, end, iteration, event.microbatch, event.stage, pipeline)
        )
    return bars


def _pipeline_index(strategy: Any) -> int:
    """Which of the data-parallel pipelines this rank is in."""
    ranks = strategy.device_mesh.mesh.reshape(strategy.pipeline_size, -1)
    return int((ranks == dist.get_rank()).nonzero()[0, 1])
