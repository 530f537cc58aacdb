"""Streams and events of the pipeline's device. All operations are no-ops on a device without streams."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NO_STREAM = nullcontext()


def current_stream(device: torch.device) -> Any:
    """Current stream of the calling thread on *device*; None on a device without streams."""
    return torch.get_device_module(device).current_stream(device) if device.type == "cuda" else None


class DeviceStreams:
    """Named device streams of a pipeline."""

    def __init__(self, device: torch.device, names: Iterable[str]) -> None:
        self.available = device.type == "cuda"
        self._module = torch.get_device_module(device) if self.available else None
        self._device = device
        self._named = {name: self._module.Stream(device) for name in names} if self._module else {}

    def make_event(self) -> Any:
        """Create an event for ordering streams, without timing; None without streams."""
        return self._module.Event() if self._module else None

    def use_named_stream(self, name: str | None) -> AbstractContextManager[Any]:
        """Make the stream *name* the current one inside the context; ``None`` keeps the current stream."""
        return self._module.stream(self._named[name]) if self._module and name is not None else _NO_STREAM

    def current(self) -> Any:
        """Current stream of the calling thread; None without streams."""
        return current_stream(self._device)

    def use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make *stream*, a result of :meth:`current`, the current one inside the context."""
        return self._module.stream(stream) if self._module else _NO_STREAM

    def record(self, event: Any) -> None:
        """Record *event* on the current stream."""
        event.record(self.current())

    def wait_event(self, event: Any) -> None:
        """Make the current stream wait for *event*."""
        self.current().wait_event(event)

    def fence(self) -> None:
        """Make all later work on any stream, including the current one, wait for all work submitted so far."""
        for stream in self._named.values():
            self.current().wait_stream(stream)
        for stream in self._named.values():
            stream.wait_stream(self.current())
