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
    """Pipeline stages that communicate between ranks."""

    runner: PipelineRunner
    schedule: ScheduleSpec
    num_microbatches: int
    stages_per_rank: int
    mesh: DeviceMesh


@dataclass(frozen=True)
class Running:
    """Description of a strategy's work."""

    title: str | None = None
    record: Callable[[int], MicroBatchRecorder] | None = None
    stages: RunningStages | None = None
    profile: Callable[..., ProfileResult] | None = None
    has_pipe: bool = False


def running(strategy: Any) -> Running:
    """Return the result of ``strategy.running()``. Without that method, use only ``strategy.profile`` if it exists."""
    answer = getattr(strategy, "running", None)
    return Running(profile=getattr(strategy, "profile", None)) if answer is None else answer()
