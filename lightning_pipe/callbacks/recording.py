"""Recording of one rank's tasks, micro-batch work and evaluations over some batches."""

from __future__ import annotations

import time
from collections import deque

from lightning_pipe.engine import SWPipeline
from lightning_pipe.engine.observe.clocks import ClockOffset
from lightning_pipe.engine.observe.timeline import EVALUATION, Bar, task_bars
from lightning_pipe.engine.plans.schedule import MAIN
from lightning_pipe.strategies.strategy_info import StrategyInfo

_ENDS = 5  # batch ends to keep; a picture shows no more batches


class TraceRecording:
    """One recording, which starts when the object is created."""

    def __init__(self, first: int, clock: ClockOffset, work: StrategyInfo, keep: int) -> None:
        self.first, self.clock = first, clock
        self.last: int | None = None
        self.ends: deque[float] = deque([time.perf_counter()], maxlen=_ENDS)
        self._keep = keep
        self._micro_batches = None if work.make_recorder is None else work.make_recorder(keep)
        self._evaluations: deque[tuple[str, float, float]] = deque(maxlen=keep)
        self._pipeline: SWPipeline | None = None
        self._offset = 0  # batch number in the fit minus iteration number in the pipeline
        self._earlier: list[Bar] = []

    @property
    def records_micro_batches(self) -> bool:
        """True if micro-batch work is recorded."""
        return self._micro_batches is not None

    def start(self, pipeline: SWPipeline, batch: int) -> None:
        """Start to record the tasks of *pipeline*, which trains *batch* of the fit next."""
        self._set_recorded_pipeline(pipeline, batch)
        pipeline.start_trace(self._keep)
        self.ends = deque([time.perf_counter()], maxlen=_ENDS)

    def switch_pipeline(self, pipeline: SWPipeline, rank: int, batch: int) -> None:
        """Switch the recording to *pipeline*, unless it is the pipeline already recorded."""
        if pipeline is self._pipeline:
            return
        self._take_bars(rank)
        self._set_recorded_pipeline(pipeline, batch)
        if pipeline.trace is None:
            pipeline.start_trace(self._keep)

    def _set_recorded_pipeline(self, pipeline: SWPipeline, batch: int) -> None:
        oldest = pipeline.in_flight[0].iter_idx if pipeline.in_flight else pipeline.num_started
        self._pipeline, self._offset = pipeline, batch - oldest

    def record_batch_end(self, batch: int) -> None:
        """Record that *batch* has been trained."""
        if self._micro_batches is not None:
            self._micro_batches.collect_batch_records()
        self.last = batch
        self.ends.append(time.perf_counter())

    def record_evaluation(self, name: str, start: float) -> None:
        """Record an evaluation called *name* that started at *start* (seconds) and has just ended."""
        self._evaluations.append((name, start, time.perf_counter()))

    def stop(self, rank: int) -> list[Bar]:
        """Stop the recording and return its bars, in seconds of this rank's clock."""
        self._take_bars(rank)
        bars, self._earlier = self._earlier, []
        if self._micro_batches is not None:
            bars.extend(self._micro_batches.stop_recording(bars, rank))
        bars.extend(Bar(rank, MAIN, name, EVALUATION, start, end) for name, start, end in self._evaluations)
        return bars

    def _take_bars(self, rank: int) -> None:
        if self._pipeline is not None:
            for bar in task_bars(self._pipeline.stop_trace(), rank):
                iteration = None if bar.iteration is None else bar.iteration + self._offset
                self._earlier.append(bar._replace(iteration=iteration))
        self._pipeline = None
