"""Description of a strategy's work for callbacks, which therefore need not import any strategy class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lightning_pipe.engine import ProfileResult
from lightning_pipe.engine.observe.timeline import Bar

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lightning_pipe.llm.run.schedule_runner import ScheduleRunner
    from lightning_pipe.llm.schedules.specs import ScheduleSpec


class MicroBatchTimeRecorder(Protocol):
    """Records the work of stages or partitions on micro-batches, from construction until :meth:`stop`."""

    def collect_batch_records(self) -> None:
        """Collect the records of the batch that was just trained."""

    def stop_recording(self, tasks: Sequence[Bar], rank: int) -> list[Bar]:
        """Stop recording."""


@dataclass(frozen=True)
class PipelineInfo:
    """Pipeline stages that communicate between ranks."""

    runner: ScheduleRunner
    schedule: ScheduleSpec
    num_microbatches: int
    stages_per_rank: int
    mesh: DeviceMesh


@dataclass(frozen=True)
class StrategyInfo:
    """Description of a strategy's work."""

    title: str | None = None
    make_recorder: Callable[[int], MicroBatchTimeRecorder] | None = None
    stages: PipelineInfo | None = None
    profile: Callable[..., ProfileResult] | None = None
    has_pipe: bool = False


def get_strategy_info(strategy: Any) -> StrategyInfo:
    """Return ``strategy.strategy_info()``. Without that method, use only ``strategy.profile`` if it exists."""
    answer = getattr(strategy, "strategy_info", None)
    return StrategyInfo(profile=getattr(strategy, "profile", None)) if answer is None else answer()
