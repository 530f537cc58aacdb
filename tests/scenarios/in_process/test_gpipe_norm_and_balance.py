"""What torchgpipe's tests state of deferred batch normalisation and of balances, and our other tests leave out."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine import PlanError
from lightning_pipe.pipe import DeferredBatchNorm, Pipe, balance_by_memory, balance_by_time
from lightning_pipe.pipe.balance import even_shares
from tests.pipe.models import gradients, same, whole_forward
from tests.rounding import Reference
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
@pytest.mark.parametrize("checkpoint", CHECKPOINT)
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


def test_gathering_statistics_keeps_nothing_for_backward() -> None:
    kept: list[torch.dtype] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.dtype)
        return tensor

    pipe = deferred(nn.Sequential(nn.BatchNorm2d(3)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        pipe(tilted().requires_grad_()).sum().backward()
    assert {*kept} == {torch.float32}  # statistics are gathered in double precision
    assert not any(buffer.requires_grad for buffer in pipe.buffers())
    pipe.close()


def test_layers_without_running_statistics_and_those_that_defer_already_stay() -> None:
    layers = [nn.BatchNorm2d(3, track_running_stats=False), DeferredBatchNorm(3)]
    pipe = Pipe(nn.Sequential(*layers), CHUNKS, devices=["cpu"], deferred_batch_norm=True)
    assert [*pipe] == layers
    assert type(pipe[0]) is nn.BatchNorm2d
    pipe(tilted())
    assert not [*pipe[0].buffers()]
    pipe.close()


def test_evaluation_between_steps_equals_batch_norms_of_whole_batches() -> None:
    batches = [tilted() for _ in range(5)]

    def evaluated(module: nn.Module) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        outputs = {}
        for step, inputs in enumerate(batches):
            optimizer.zero_grad()
            module.train()(inputs).mean().backward()
            optimizer.step()
            with torch.no_grad():
                outputs[f"after step {step}"] = module.eval()(inputs)
        return outputs

    whole = Reference.of(lambda: evaluated(nn.Sequential(nn.BatchNorm2d(3))))
    pipe = deferred(nn.Sequential(nn.BatchNorm2d(3)))
    assert whole.differences(evaluated(pipe)) == []
    pipe.close()


def test_statistics_are_the_whole_batchs_as_long_as_the_layer_before_is() -> None:
    whole = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    pipe = deferred(whole)
    optimizer = torch.optim.SGD(chain(whole.parameters(), pipe.parameters()), lr=0.1)
    inputs, weights = tilted(), torch.rand(16, 3, 8, 8)
    untrained = copy.deepcopy(whole)

    def first_statistics() -> dict[str, Tensor]:
        layers = copy.deepcopy(untrained)
        layers(inputs)
        return dict(layers[1].named_buffers())

    statistics = Reference.of(first_statistics)
    outputs = [module(inputs) for module in (whole, pipe)]
    assert not torch.allclose(*outputs)  # normalised by mini-batch, and by micro-batch
    assert statistics.differences(dict(pipe[1].named_buffers())) == []
    for output in outputs:
        (output * weights).sum().backward()
    optimizer.step()
    assert not torch.allclose(whole[0].weight, pipe[0].weight)  # type: ignore[arg-type]
    for module in (whole, pipe):
        module(inputs)
    assert not torch.allclose(whole[1].running_mean, pipe[1].running_mean)  # type: ignore[arg-type]
    pipe.close()


# ---------------------------------------------------------------------- balances


def test_known_costs_are_shared_out_as_known() -> None:
    assert even_shares([1, 2, 3, 4, 5, 6], 2) == [4, 2]
    assert even_shares([0, 0], 2) == [1, 1]
    with pytest.raises(PlanError, match="expected a whole number, 1 or more"):
        even_shares([42], -1)


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


@both
def test_the_mode_is_the_same_after_measuring(measure: Measure) -> None:
    layers = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Dropout())).eval()
    layers[1].train()
    measure(layers, 2, torch.rand(2, 1))
    assert [one.training for one in layers.modules()] == [False, False, True, True]


def test_memory_is_shared_out_by_what_layers_keep() -> None:
    def keeps(times: int) -> nn.Module:
        def call(input: Tensor) -> Tensor:
            for _ in range(times):
                input = torch.sin(input)  # each keeps what it is given
            return input

        return Calls(call)

    sample = torch.rand(10, 100)
    for times, shares in (([1, 2, 3, 4, 5, 6], [4, 2]), ([6, 5, 4, 3, 2, 1], [2, 4])):
        assert balance_by_memory(nn.Sequential(*map(keeps, times)), 2, sample) == shares


def test_the_parameters_scale_weighs_them_against_activations() -> None:
    class Trade(nn.Module):
        def __init__(self, parameters: int, activations: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(parameters))
            self.activations = activations

        def forward(self, input: Tensor) -> Tensor:
            for _ in range(self.activations):
                input = torch.sin(input)
            return input

    layers = nn.Sequential(*(Trade(parameters, 7 - parameters) for parameters in range(1, 7)))
    assert balance_by_memory(layers, 2, torch.rand(1), parameter_scale=0) == [2, 4]
    assert balance_by_memory(layers, 2, torch.rand(1), parameter_scale=100) == [4, 2]
