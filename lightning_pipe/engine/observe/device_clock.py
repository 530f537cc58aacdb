"""When a device's stream came to a place, in the host's seconds.

The host is done with a task when it has launched the task's kernels; when these began and ended, only events in the
stream can tell. Those are resolved once, at the end, so that nothing is waited for meanwhile.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class DeviceClock:
    """Takes the time on a device's streams, between two moments at which it is compared with the host's clock.

    Making it and :meth:`resolve` wait until the device is idle; :meth:`now` does not wait.

    Args:
        device: one with streams.
        module: PyTorch's module for such devices.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self._device = device
        self._module = module or torch.get_device_module(device)
        self._begin = self._compare()

    def now(self) -> Any:
        """A mark in the calling thread's current stream."""
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def resolve(self, events: list[Any]) -> list[float]:
        """When the streams came to *events*: seconds of ``time.perf_counter``.

        The device's clock may run a little faster or slower than the host's: between the two comparisons it is taken
        to do so evenly. Exact to some microseconds, which grow with the time since the first comparison: events tell
        it in single precision.
        """
        begin_event, begin = self._begin
        end_event, end = self._compare()
        ticks = begin_event.elapsed_time(end_event)
        seconds_per_tick = (end - begin) / ticks if ticks > 0 else 1e-3
        return [begin + seconds_per_tick * begin_event.elapsed_time(event) for event in events]

    def _compare(self) -> tuple[Any, float]:
        self._module.synchronize(self._device)
        before = time.perf_counter()
        event = self.now()
        event.synchronize()
        return event, (before + time.perf_counter()) / 2
