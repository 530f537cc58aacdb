"""Records what a pipe's partitions do with micro-batches.

Tested in ``tests/callbacks/test_trace.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipe.engine.observe.timeline import BACKWARD, FORWARD, RECOMPUTE, Bar, in_iterations, microbatch_bar
from lightning_pipe.pipe.pipe import Pipe
from lightning_pipe.pipe.plans import work_of

__all__ = ["PartitionRecorder"]

_KINDS = {"Forward": FORWARD, "Recompute": RECOMPUTE, "Backward": BACKWARD}


class PartitionRecorder:
    """Records the work of partitions from the moment it is made until :meth:`stop`.

    Args:
        pipe: the pipe, of which there is one recording at a time.
        keep: the number of records to keep; the latest are kept.
    """

    def __init__(self, pipe: Pipe, keep: int) -> None:
        self._pipe = pipe
        pipe.start_trace(keep)

    def batch_done(self) -> None:
        """The pipe keeps the records."""

    def stop(self, tasks: Sequence[Bar], rank: int) -> list[Bar]:
        """Stop recording; returns a bar for each forward, recomputation and backward of a micro-batch.

        Args:
            tasks: bars of the tasks that ran meanwhile, each for its iteration.
            rank: this rank.
        """
        bars = []
        for span in self._pipe.stop_trace():
            what, partition = work_of(span.task)
            kind = _KINDS[what]
            bars.append(microbatch_bar(partition, kind, span.iteration, span.start, span.end, rank, span.thread))
        return in_iterations(sorted(bars, key=lambda bar: bar.start), tasks)
