"""What torchgpipe's tests state of deferred batch normalisation and of balances, and our other tests leave out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.pipe import DeferredBatchNorm, Pipe, balance_by_memory, balance_by_time
from tests.pipe.models import gradients, same, whole_forward
from tests.scenarios.in_process.test_gpipe_behaviours import Calls

CHUNKS = 4
CHECKPOINT: tuple[Any, ...] = ("always", "except_last", "never")
Measure = Callable[[nn.Sequential, int, Any], list[int]]
both = pytest.mark.parametrize("measure", [balance_by_time, balance_by_memory])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def tilted() -> Tensor:
    """Images whose mean differs from row to row, and whose variance differs from channel to channel."""
    scale = torch.tensor([1.0, 10.0, 100.0]).view(1, 3, 1, 1)
    return torch.rand(16, 3, 8, 8) * scale + 2.0 ** torch.arange(16).view(16, 1, 1, 1).remainder(8)


def deferred(whole: nn.Sequential, chunks: int = CHUNKS, checkpoint: Any = "except_last") -> Pipe:
    return Pipe(copy.deepcopy(whole), chunks, checkpoint, ["cpu"], deferred_batch_norm=True)


# ---------------------------------------------------------------------- deferred batch normalisation


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("chunks", [1, CHUNKS])
def test_outputs_and_gradients_are_batch_norms_of_each_micro_batch(
    chunks: int, checkpoint: Any, needs_grad: bool
) -> None:
    whole = nn.Sequential(nn.BatchNorm2d(3))
    pipe = deferred(whole, chunks, checkpoint)
    mine = tilted()
    theirs = mine.clone().requires_grad_(needs_grad)
    weights = torch.rand(16, 3, 8, 8)
    output = pipe(mine.requires_grad_(needs_grad))
    expected = whole_forward(whole, theirs, chunks)
    (output * weights).mean().backward()
    (expected * weights).mean().backward()
    assert same([output, gradients(pipe), mine.grad], [expected, gradients(whole), theirs.grad])
    pipe.close()


def test_layers_without_running_statistics_and_those_that_defer_already_stay() -> None:
    layers = [nn.BatchNorm2d(3, track_running_stats=False), DeferredBatchNorm(3)]
    pipe = Pipe(nn.Sequential(*layers), CHUNKS, devices=["cpu"], deferred_batch_norm=True)
    assert [*pipe] == layers
    assert type(pipe[0]) is nn.BatchNorm2d
    pipe(tilted())
    assert not [*pipe[0].buffers()]
    pipe.close()


# ---------------------------------------------------------------------- balances


@both
def test_layers_may_pass_tuples_and_change_shapes_where_they_are_measured(measure: Measure) -> None:
    layers = nn.Sequential(
        nn.Conv2d(3, 2, 1), nn.Flatten(), Calls(lambda x: (x, x.detach())), Calls(sum), nn.Linear(128, 10)
    )
    assert sum(measure(layers, 2, torch.rand(4, 3, 8, 8))) == 5


@both
def test_gradients_that_were_there_are_there_after_measuring(measure: Measure) -> None:
    layers = nn.Sequential(nn.Conv2d(3, 3, 1))
    sample = torch.rand(1, 3, 8, 8, requires_grad=True)
    layers(sample).norm().backward()
    before = [one.grad.clone() for one in (sample, *layers.parameters()) if one.grad is not None]
    assert measure(layers, 1, sample) == [1]
    after = [one.grad for one in (sample, *layers.parameters())]
    assert len(before) == 3
    assert all(one is not None and torch.equal(one, was) for one, was in zip(after, before, strict=True))
