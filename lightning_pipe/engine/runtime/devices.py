"""Streams and events of the device a pipeline runs on; nothing at all where the device has none."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NO_STREAM = nullcontext()


class DeviceStreams:
    """A pipeline's named streams.

    Args:
        device: the device; CPU (and any other without streams) makes every method a no-op.
        names: names of the streams to create.
    """

    def __init__(self, device: torch.device, names: Iterable[str]) -> None:
        self.available = device.type == "cuda"
        self._module = torch.get_device_module(device) if self.available else None
        self._device = device
        self._named = {name: self._module.Stream(device) for name in names} if self._module else {}

    def event(self) -> Any:
        """A new event that can order streams (without timing)."""
        return self._module.Event() if self._module else None

    def named(self, name: str | None) -> AbstractContextManager[Any]:
        """Make the stream called *name* the current one; ``None`` leaves the current one."""
        return self._module.stream(self._named[name]) if self._module and name is not None else _NO_STREAM

    def current(self) -> Any:
        """The calling thread's current stream."""
        return self._module.current_stream(self._device) if self._module else None

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """Make *stream*, a value of :meth:`current`, the current one."""
        return self._module.stream(stream) if self._module else _NO_STREAM

    def record(self, event: Any) -> None:
        """Record *event* on the current stream."""
        event.record(self.current())

    def current_waits_for(self, event: Any) -> None:
        """Let the current stream wait for *event*."""
        self.current().wait_event(event)

    def join(self) -> None:
        """What any of the streams, the current one included, is given from here on comes after all given so far."""
        for stream in self._named.values():
            self.current().wait_stream(stream)
        for stream in self._named.values():
            stream.wait_stream(self.current())
