"""Times of events in device streams, on the host's clock.

The host finishes a task when it has launched the task's kernels. Only events in the stream record when the kernels
began and ended. The events are resolved once at the end, so that recording never waits for the device.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class DeviceClock:
    """Clock for a device's streams, compared with the host's at creation and in :meth:`to_host_seconds`. Both wait."""

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self._device = device
        self._module = module or torch.get_device_module(device)
        self._begin = self._sample_clocks()

    def record_event(self) -> Any:
        """Record a timing event in the calling thread's current stream."""
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def to_host_seconds(self, events: list[Any]) -> list[float]:
        """Times at which the streams reached *events*, in seconds of ``time.perf_counter``.

        A constant clock rate between the two comparisons is assumed, since the device's clock may run slightly faster
        or slower than the host's. The error is a few microseconds and grows with the time since the first comparison,
        because events measure elapsed time in single precision.
        """
        begin_event, begin = self._begin
        end_event, end = self._sample_clocks()
        ticks = begin_event.elapsed_time(end_event)
        seconds_per_tick = (end - begin) / ticks if ticks > 0 else 1e-3
        return [begin + seconds_per_tick * begin_event.elapsed_time(event) for event in events]

    def _sample_clocks(self) -> tuple[Any, float]:
        self._module.synchronize(self._device)
        before = time.perf_counter()
        event = self.record_event()
        event.synchronize()
        return event, (before + time.perf_counter()) / 2
