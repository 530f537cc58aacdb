from __future__ import annotations

import torch

from lightning_pipe.engine.runtime.devices import DeviceStreams
from tests.engine.fake_device import fake_device


def test_a_device_without_streams_makes_everything_a_no_op() -> None:
    streams = DeviceStreams(torch.device("cpu"), ["copy"])
    assert not streams.available
    assert streams.event() is None
    assert streams.current() is None
    with streams.named("copy"), streams.using(None):
        streams.join()


def test_a_named_stream_is_current_inside_and_only_there() -> None:
    with fake_device() as device:
        streams = DeviceStreams(torch.device("cuda"), ["copy", "dist"])
        with streams.named("copy"):
            copy = streams.current()
            with streams.named("dist"):
                assert streams.current() not in (copy, device.default)
            with streams.named(None):
                assert streams.current() is copy
        assert streams.current() is device.default
        with streams.using(copy):
            assert streams.current() is copy


def test_an_event_orders_what_comes_after_it_behind_what_came_before_it() -> None:
    with fake_device() as device:
        streams = DeviceStreams(torch.device("cuda"), ["copy"])
        event = streams.event()
        with streams.named("copy"):
            device.launch(("a", 0))
            streams.record(event)
            device.launch(("b", 0))
        streams.current_waits_for(event)
        device.launch(("c", 0))
        assert device.ran_after["c", 0] == {("a", 0)}


def test_joining_orders_every_stream_behind_all_others() -> None:
    with fake_device() as device:
        streams = DeviceStreams(torch.device("cuda"), ["copy", "dist"])
        device.launch(("a", 0))
        with streams.named("dist"):
            device.launch(("b", 0))
        streams.join()
        with streams.named("copy"):
            device.launch(("c", 0))
        assert device.ran_after["c", 0] == {("a", 0), ("b", 0)}
