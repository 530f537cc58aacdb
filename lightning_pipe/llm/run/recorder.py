"""Records the work of a rank's stages on micro-batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_pipe.engine.observe.timeline import Bar, assign_iterations_to_bars
from lightning_pipe.llm.run.schedule_runner import ScheduleRunner


class StageRecorder:
    """Records the events of this rank's stages from construction until :meth:`stop`.

    If other code has enabled the runner's events before, these events stay with the runner.
    """

    def __init__(self, runner: ScheduleRunner, mesh: DeviceMesh, keep: int) -> None:
        self._runner, self._mesh = runner, mesh
        self._events: deque[Bar] = deque(maxlen=keep)
        self._was_recording, self._num_collected = runner.record_events, len(runner.events)
        runner.record_events = True

    def collect_batch_records(self) -> None:
        """Collect the runner's new events."""
        events = self._runner.events
        self._events.extend(events[self._num_collected :])
        if self._was_recording:
            self._num_collected = len(events)
        else:
            del events[self._num_collected :]

    def stop_recording(self, tasks: Sequence[Bar], rank: int) -> list[Bar]:
        """Stop recording, and return a bar for each forward, backward and wait of a micro-batch."""
        self.collect_batch_records()
        self._runner.record_events = self._was_recording
        ranks = self._mesh.mesh.reshape(self._mesh.size(0), -1)
        pipeline = int((ranks == dist.get_rank()).nonzero()[0, 1])
        bars = [event._replace(rank=rank, pipeline=pipeline) for event in self._events]
        return assign_iterations_to_bars(bars, tasks)
