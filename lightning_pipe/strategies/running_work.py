"""Description of a strategy's work for callbacks, which therefore need not import any strategy class."""

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


class MicroBatchRecorder(Protocol):
    """Records the work of stages or partitions on micro-batches, from construction until :meth:`stop`."""

    def batch_done(self) -> None:
        """Collect the records of the batch that was just trained."""

    def stop(self, tasks: Sequence[Bar], rank: int) -> list[Bar]:
        """Stop recording."""


@dataclass(frozen=True)
class RunningStages:
    """Pipeline stages that communicate between ranks.

    Attributes:
        runner: runner of this rank's stages, which records their events on request.
        schedule: the schedule of the stages.
        num_microbatches: number of micro-batches per batch.
        stages_per_rank: number of stages on each rank.
        mesh: device mesh of all ranks, whose first dimension is the pipeline.
    """

    runner: PipelineRunner
    schedule: ScheduleSpec
    num_microbatches: int
    stages_per_rank: int
    mesh: DeviceMesh


@dataclass(frozen=True)
class Running:
    """Description of a strategy's work.

    Attributes:
        title: name of the work in timelines (default None: the plan's name).
        record: function that starts a recorder of micro-batches; its argument is the maximum number of records (default
            None: no micro-batches).
        stages: pipeline stages of this rank (default None: no stages).
        profile: function that measures the exposed time of each task (default None: tasks cannot be replayed).
        has_pipe: True if one process trains an ``nn.Sequential`` on several devices (default False).
    """

    title: str | None = None
    record: Callable[[int], MicroBatchRecorder] | None = None
    stages: RunningStages | None = None
    profile: Callable[..., ProfileResult] | None = None
    has_pipe: bool = False


def running(strategy: Any) -> Running:
    """Return the result of ``strategy.running()``. Without that method, use only ``strategy.profile`` if it exists."""
    answer = getattr(strategy, "running", None)
    return Running(profile=getattr(strategy, "profile", None)) if answer is None else answer()
