"""Records one rank's tasks, its work on micro-batches and its evaluations over some batches.

Tested in ``tests/callbacks/test_trace.py``.
"""

from __future__ import annotations

import time
from collections import deque

from lightning_pipe.engine import SWPipeline
from lightning_pipe.engine.observe.clocks import ClockOffset
from lightning_pipe.engine.observe.timeline import EVALUATION, Bar, task_bars
from lightning_pipe.engine.plans.schedule import MAIN
from lightning_pipe.strategies.running_work import Running

__all__ = ["Recording"]

_ENDS = 5  # of batches: more are in no picture


class Recording:
    """One recording, which begins when this is made.

    Args:
        first: the batch it begins with.
        clock: how far this rank's clock is off now.
        work: the strategy's answers; its work on micro-batches is recorded too, if there is any.
        keep: the number of tasks, and of records of micro-batches, to keep.

    Attributes:
        first: see above.
        clock: see above.
        last: the last batch trained, once there is one.
        ends: when the latest batches were done, and before them the recording's begin (seconds of this rank's clock).
    """

    def __init__(self, first: int, clock: ClockOffset, work: Running, keep: int) -> None:
        self.first, self.clock = first, clock
        self.last: int | None = None
        self.ends: deque[float] = deque([time.perf_counter()], maxlen=_ENDS)
        self._keep = keep
        self._micro_batches = None if work.record is None else work.record(keep)
        self._evaluations: deque[tuple[str, float, float]] = deque(maxlen=keep)
        self._pipeline: SWPipeline | None = None
        self._offset = 0  # of the pipeline's iterations, behind which batches of the fit they are
        self._earlier: list[Bar] = []

    @property
    def of_stages(self) -> bool:
        """Whether it records work on micro-batches."""
        return self._micro_batches is not None

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
        if self._micro_batches is not None:
            self._micro_batches.batch_done()
        self.last = batch
        self.ends.append(time.perf_counter())

    def evaluated(self, name: str, start: float) -> None:
        """Note that an evaluation called *name*, begun at *start* (seconds), is over."""
        self._evaluations.append((name, start, time.perf_counter()))

    def stop(self, rank: int) -> list[Bar]:
        """Record no more; returns what was recorded, by this rank's clock."""
        self._take_bars(rank)
        bars, self._earlier = self._earlier, []
        if self._micro_batches is not None:
            bars.extend(self._micro_batches.stop(bars, rank))
        bars.extend(Bar(rank, MAIN, name, EVALUATION, start, end) for name, start, end in self._evaluations)
        return bars

    def _take_bars(self, rank: int) -> None:
        if self._pipeline is not None:
            for bar in task_bars(self._pipeline.stop_trace(), rank):
                of_fit = None if bar.iteration is None else bar.iteration + self._offset
                self._earlier.append(bar._replace(iteration=of_fit))
        self._pipeline = None
