"""Lightning callbacks that measure and display the work of the strategies.

A callback queries its strategy through ``strategies/strategy_info`` and imports no strategy class.
Functions that several callbacks need are in ``common``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_pipe.callbacks.bubble import BubbleMonitor
    from lightning_pipe.callbacks.monitor import PipelineMonitor
    from lightning_pipe.callbacks.profiler import PipelineProfiler
    from lightning_pipe.callbacks.trace import PipelineTrace

__all__ = ["BubbleMonitor", "PipelineMonitor", "PipelineProfiler", "PipelineTrace"]

# Modules that are imported on first access: importing this package imports neither Rich nor other slow packages.
_MODULES = {
    "BubbleMonitor": "lightning_pipe.callbacks.bubble",
    "PipelineMonitor": "lightning_pipe.callbacks.monitor",
    "PipelineProfiler": "lightning_pipe.callbacks.profiler",
    "PipelineTrace": "lightning_pipe.callbacks.trace",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "BubbleMonitor":  # requires a newer torch than the other callbacks
        from lightning_pipe.environment import require_min_package_version

        require_min_package_version("torch", "2.13", "language models in pipeline stages")
    return getattr(import_module(_MODULES[name]), name)
