"""A device with streams that does nothing but keep account of what is ordered before what."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

Work = tuple[str, int]


class FakeStream:
    """Work goes in one after the other; *before* is all work that the next one is ordered after."""

    def __init__(self, device: object = None) -> None:
        self.before: frozenset[Work] = frozenset()

    def wait_event(self, event: FakeEvent) -> None:
        assert event.before is not None, "a stream waits for an event that was not recorded: that returns at once"
        self.before |= event.before

    def wait_stream(self, stream: FakeStream) -> None:
        self.before |= stream.before


class FakeEvent:
    """Stands for all work before it; ``None`` until it is recorded."""

    before: frozenset[Work] | None = None

    def __init__(self, enable_timing: bool = False) -> None:
        """Times are all the same here."""

    def record(self, stream: FakeStream) -> None:
        self.before = stream.before

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def elapsed_time(self, later: FakeEvent) -> float:
        return 0.0


class FakeDevice:
    """Takes the place of ``torch.cuda``: its streams, its events, and each thread's current stream."""

    Stream = FakeStream
    Event = FakeEvent

    def __init__(self) -> None:
        self.default = FakeStream()
        self._local = threading.local()
        self._lock = threading.Lock()
        self.ran_after: dict[Work, frozenset[Work]] = {}
        self.ran_on: dict[Work, FakeStream] = {}

    def current_stream(self, device: object = None) -> FakeStream:
        return getattr(self._local, "stream", self.default)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream
        yield
        self._local.stream = before

    def synchronize(self, device: object = None) -> None:
        """Nothing is ever under way."""

    def launch(self, work: Work) -> None:
        """Give *work* to the current stream."""
        stream = self.current_stream()
        with self._lock:
            self.ran_after[work] = stream.before
            self.ran_on[work] = stream
            stream.before |= {work}


@contextmanager
def fake_device() -> Iterator[FakeDevice]:
    """Pipelines built and run in the body on ``device="cuda"`` use the fake that this gives."""
    device = FakeDevice()
    with mock.patch.object(torch, "get_device_module", return_value=device):
        yield device
