"""The arithmetic that turns a device's events into the host's time; the device is a fake."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from lightning_pipe.engine.observe.device_clock import DeviceClock

HOST_AT_ZERO = 500.0  # the host's clock when the device's says 0


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at = -1.0
        self.done = False

    def record(self, stream: str) -> None:
        assert stream == "current stream of cuda"
        self.at = self.device.milliseconds

    def synchronize(self) -> None:
        self.done = True

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


class FakeDevice:
    """Takes the place of ``torch.cuda``; its clock is a hundredth slower than the host's."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.waits = 0

    def Event(self, enable_timing: bool) -> FakeEvent:
        assert enable_timing
        return FakeEvent(self)

    def current_stream(self, device: torch.device) -> str:
        return f"current stream of {device}"

    def synchronize(self, device: torch.device) -> None:
        self.waits += 1

    def host(self) -> float:
        return HOST_AT_ZERO + 1.01 * self.milliseconds / 1e3


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def test_events_are_placed_on_the_hosts_clock_whatever_speed_the_devices_has(device: FakeDevice) -> None:
    with mock.patch("time.perf_counter", device.host):
        clock = DeviceClock(torch.device("cuda"), device)
        device.milliseconds = 250.0
        early = clock.record_event()
        device.milliseconds = 700.0
        late = clock.record_event()
        device.milliseconds = 1000.0
        assert clock.to_host_seconds([late, early]) == pytest.approx([HOST_AT_ZERO + 0.707, HOST_AT_ZERO + 0.2525])
