"""Recorder of the forwards, recomputations and backwards of a pipe's partitions."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipe.engine.observe.timeline import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    Bar,
    assign_iterations_to_bars,
    microbatch_bar,
)
from lightning_pipe.pipe.pipe import Pipe
from lightning_pipe.pipe.plans import parse_task_name

_KINDS = {"Forward": FORWARD, "Recompute": RECOMPUTE, "Backward": BACKWARD}


class PartitionRecorder:
    """Records the work of partitions from construction until :meth:`stop`."""

    def __init__(self, pipe: Pipe, keep: int) -> None:
        self._pipe = pipe
        pipe.start_trace(keep)

    def collect_batch_records(self) -> None:
        """Do nothing: the pipe stores the records."""

    def stop_recording(self, tasks: Sequence[Bar], rank: int) -> list[Bar]:
        """Stop recording, and return a bar for each forward, recomputation and backward of a micro-batch."""
        bars = []
        for span in self._pipe.stop_trace():
            task_kind, partition = parse_task_name(span.task)
            kind = _KINDS[task_kind]
            bars.append(microbatch_bar(partition, kind, span.iteration, span.start, span.end, rank, span.thread))
        return assign_iterations_to_bars(sorted(bars, key=lambda bar: bar.start), tasks)
