"""Everything in a value is told which stream uses it, where there is a device with streams."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch

from lightning_pipe.engine.runtime.record_use import record_use

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


def used(value: Any, *, initialized: bool = True) -> None:
    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=initialized),
        mock.patch.object(torch.cuda, "current_stream", return_value=STREAM),
    ):
        record_use(value)


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


def test_nothing_is_told_before_the_device_is_in_use() -> None:
    features = Features()
    used([features], initialized=False)
    assert features.streams == []
