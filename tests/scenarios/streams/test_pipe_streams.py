"""The copies of the in-process pipe between two devices, whose streams are watched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_pipe.pipe import Pipe
from lightning_pipe.pipe.copies import Copier, PendingCopy
from tests.engine.device_tensors import Accelerator, left_out, watched
from tests.engine.race_detector import FakeStream

DEVICES = ["cuda:0", "cuda:1"]


@contextmanager
def two_devices() -> Iterator[Accelerator]:
    with ExitStack() as stack:
        for name, stand_in in (
            ("is_available", lambda: True),
            ("device_count", lambda: 2),
            ("init", lambda: None),
            ("default_generators", (torch.Generator(), torch.Generator())),
        ):
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        yield stack.enter_context(watched())


def layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 1))


def run(by_loss: bool, checkpoint: Any = "except_last") -> Accelerator:
    """Two steps, each with an optimizer's step on both devices."""
    with two_devices() as accelerator:
        made = Pipe(layers(), 4, checkpoint, devices=DEVICES, balance=[2, 2])
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        for _ in range(2):
            x, y = accelerator.on_host([torch.ones(8, 3), torch.ones(8, 1)])
            if by_loss:
                made.loss(x, y.to(DEVICES[1]), nn.MSELoss()).backward()
            else:
                nn.functional.mse_loss(made(x), y.to(DEVICES[1])).backward()
            optimizer.step()
            optimizer.zero_grad()
        made.close()
    return accelerator


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("by_loss", [True, False], ids=["loss", "output"])
def test_copies_of_the_pipe_are_ordered_on_both_devices(by_loss: bool, checkpoint: str) -> None:
    accelerator = run(by_loss, checkpoint)
    assert list(map(str, accelerator.findings)) == []
    assert accelerator.handler.seq_num > 100


def test_a_receiver_that_does_not_wait_for_the_copy_is_found() -> None:
    def receive(copier: Copier, sent: PendingCopy, partition: int) -> Any:
        return sent.value

    with mock.patch.object(Copier, "receive", receive):
        assert {one.kind for one in run(True).findings} == {"race"}


def test_a_copy_that_does_not_wait_for_its_source_is_found() -> None:
    with mock.patch.object(FakeStream, "wait_stream", left_out):
        assert "race" in {one.kind for one in run(True).findings}
