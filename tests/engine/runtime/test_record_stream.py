"""Everything in a value is told which stream uses it, where there is a device with streams."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_pipe.engine.runtime.record_stream import record_stream

STREAM = object()


class Features:
    def __init__(self) -> None:
        self.streams: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


@dataclass
class Batch:
    features: Features
    label: torch.Tensor


def used(value: Any, *, initialized: bool = True, stream: Any = STREAM) -> None:
    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=initialized),
        mock.patch.object(torch.cuda, "current_stream", return_value=stream),
    ):
        record_stream(value)


@pytest.mark.parametrize(
    "holding",
    [
        lambda one: one,
        lambda one: [1, (one, "text")],
        lambda one: OrderedDict(a={"b": one}),
        lambda one: Batch(one, torch.zeros(1)),
    ],
    ids=["alone", "in sequences", "in mappings", "in a dataclass"],
)
def test_a_value_is_told_the_current_stream_once_wherever_it_is(holding: Any) -> None:
    features = Features()
    used(holding(features))
    assert features.streams == [STREAM]


class OnHost:
    """Object of a user, whose tensors are on the host."""

    def __init__(self) -> None:
        self.values = torch.zeros(1)
        self.features = Features()

    def record_stream(self, stream: Any) -> None:
        self.values.record_stream(stream)
        self.features.record_stream(stream)


def test_cpu_tensors_in_an_object_are_ignored_on_a_machine_with_a_gpu() -> None:
    held = OnHost()
    stream = torch.Stream(stream_id=0, device_index=0, device_type=1)
    with pytest.raises(NotImplementedError):
        held.values.record_stream(stream)
    used([held], stream=stream)
    assert held.features.streams == [stream]


def test_nothing_is_told_before_the_device_is_in_use() -> None:
    features = Features()
    used([features], initialized=False)
    assert features.streams == []
