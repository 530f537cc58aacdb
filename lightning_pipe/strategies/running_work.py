"""The answers that a strategy gives callbacks about its work, so that callbacks need not know strategies by class.

Tested in ``tests/callbacks/test_trace.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lightning_pipe.engine import ProfileResult
from lightning_pipe.engine.observe.timeline import Bar

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lightning_pipe.llm.run.runner import PipelineRunner
    from lightning_pipe.llm.schedules.named import ScheduleSpec

__all__ = ["MicroBatchRecorder", "Running", "RunningStages", "running"]


class MicroBatchRecorder(Protocol):
    """Records the work of stages or partitions on micro-batches, from the moment it is made until :meth:`stop`."""

    def batch_done(self) -> None:
        """Take the records of the batch that was just trained."""

    def stop(self, tasks: Sequence[Bar], rank: int) -> list[Bar]:
        """Stop recording.

        Args:
            tasks: bars of the tasks that ran meanwhile, each for its iteration.
            rank: this rank.

        Returns:
            A bar for each forward, backward and wait, for the iteration of the task in which it began.
        """


@dataclass(frozen=True)
class RunningStages:
    """Pipeline stages that communicate between ranks.

    Attributes:
        runner: runs this rank's stages, and records their events on request.
        schedule: the schedule of the stages.
        num_microbatches: number of micro-batches of a batch.
        stages_per_rank: number of stages on each rank.
        mesh: all ranks; the first dimension is the pipeline.
    """

    runner: PipelineRunner
    schedule: ScheduleSpec
    num_microbatches: int
    stages_per_rank: int
    mesh: DeviceMesh


@dataclass(frozen=True)
class Running:
    """A strategy's answers.

    Attributes:
        title: name of the work in pictures; the plan's name if None.
        record: starts a recorder of micro-batches that keeps at most so many records; None without micro-batches.
        stages: the pipeline stages; None for other strategies.
        profile: measures the cost of each task; None where tasks cannot be replayed one by one.
        has_pipe: whether one process trains an ``nn.Sequential`` on several devices.
    """

    title: str | None = None
    record: Callable[[int], MicroBatchRecorder] | None = None
    stages: RunningStages | None = None
    profile: Callable[..., ProfileResult] | None = None
    has_pipe: bool = False


def running(strategy: Any) -> Running:
    """Ask *strategy* about its work; without a method ``running`` it has only tasks, and perhaps ``profile``."""
    answer = getattr(strategy, "running", None)
    return Running(profile=getattr(strategy, "profile", None)) if answer is None else answer()
