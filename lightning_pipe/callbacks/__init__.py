"""Lightning callbacks that measure and display the work of the strategies.

A callback queries its strategy through ``strategies/running_work`` and imports no strategy class.
Functions that several callbacks need are in ``common``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_pipe.callbacks.bubble import BubbleMonitor
    from lightning_pipe.callbacks.monitor import PipelineMonitor
    from lightning_pipe.callbacks.profiler import PipelineProfiler
    from lightning_pipe.callbacks.trace import PipelineTrace

__all__ = ["BubbleMonitor", "PipelineMonitor", "PipelineProfiler", "PipelineTrace"]


def __getattr__(name: str) -> Any:
    # Imported on demand, because it requires a newer torch than the other callbacks.
    if name == "BubbleMonitor":
        from lightning_pipe.environment import require_torch, stacks

        require_torch(stacks().language_models, "language models in pipeline stages")
        from lightning_pipe.callbacks.bubble import BubbleMonitor

        return BubbleMonitor
    # Imported on demand, so that importing this package does not import Rich and other slow packages.
    if name == "PipelineMonitor":
        from lightning_pipe.callbacks.monitor import PipelineMonitor

        return PipelineMonitor
    if name == "PipelineProfiler":
        from lightning_pipe.callbacks.profiler import PipelineProfiler

        return PipelineProfiler
    if name == "PipelineTrace":
        from lightning_pipe.callbacks.trace import PipelineTrace

        return PipelineTrace
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
