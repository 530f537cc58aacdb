"""Sharing out layers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn

from lightning_pipe.engine import PlanError
from lightning_pipe.pipe import balance_by_memory, balance_by_parameters, balance_by_time
from lightning_pipe.pipe.balance import balance_by_costs
from tests.scenarios.in_process.test_gpipe_behaviors import Calls


@given(some.lists(some.integers(0, 20), min_size=1, max_size=9), some.integers(1, 9))
def test_no_contiguous_shares_have_a_smaller_largest_one(costs: list[int], partitions: int) -> None:
    partitions = min(partitions, len(costs))
    shares = balance_by_costs(costs, partitions)
    assert len(shares) == partitions
    assert sum(shares) == len(costs)
    assert min(shares) >= 1

    def largest(cuts: tuple[int, ...]) -> int:
        return max(sum(costs[begin:end]) for begin, end in itertools.pairwise((0, *cuts, len(costs))))

    ends = tuple(itertools.accumulate(shares))[:-1]
    best = min(map(largest, itertools.combinations(range(1, len(costs)), partitions - 1)))
    assert largest(ends) == best


@pytest.mark.parametrize(("costs", "partitions"), [([1, 2], 3), ([], 1), ([1], 0)])
def test_fewer_layers_than_partitions_are_refused(costs: list[float], partitions: int) -> None:
    with pytest.raises(PlanError, match=r"expected at least one layer for each|expected a whole number, 1 or more"):
        balance_by_costs(costs, partitions)


def test_of_equally_good_cuts_the_latest_are_taken() -> None:
    # Earlier partitions hold more micro-batches, and the last one a loss.
    assert balance_by_costs([1, 1, 1], 2) == [2, 1]
    assert balance_by_costs([1, 1, 1, 1, 1], 3) == [2, 2, 1]
    assert balance_by_costs([0, 0, 2, 0], 2) == [3, 1]


def test_parameters_are_counted() -> None:
    layers = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(10, 10))
    assert balance_by_parameters(layers, 2) == [2, 1]
    assert balance_by_parameters(layers, 3) == [1, 1, 1]


class Clock:
    """Goes on when it is told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Takes(nn.Module):
    """Takes a known time in forward and in backward, by a clock."""

    def __init__(self, clock: Clock, forward: float, backward: float) -> None:
        super().__init__()
        self.times = clock, forward, backward
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = _Take.apply(input * self.weight, *self.times)
        return output


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, clock: Clock, forward: float, backward: float) -> Tensor:
        ctx.clock, ctx.backward_time = clock, backward
        clock.now += forward
        return input.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.now += ctx.backward_time
        return gradient, None, None, None


def test_time_is_that_of_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    # Five layers of 2 and one of 10, of which most is backward.
    layers = nn.Sequential(*(Takes(clock, 1, 1) for _ in range(5)), Takes(clock, 1, 9))
    assert balance_by_time(layers, 2, torch.ones(2, 2), repeats=1) == [5, 1]


def test_memory_is_that_of_activations_and_parameters() -> None:
    layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Tanh())
    assert balance_by_memory(layers, 2, torch.ones(1, 64)) == [1, 5]  # parameters are all
    rows = torch.ones(1000, 64)  # a Linear keeps what it is given, a Tanh what it gives: as much
    assert balance_by_memory(layers, 2, rows) == [3, 3]
    assert balance_by_memory(layers, 2, torch.ones(1, 64), chunks=1000) == [3, 3]


def test_measuring_leaves_the_layers_and_random_numbers_as_they_were() -> None:
    layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.ReLU(inplace=True))
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    torch.manual_seed(1)
    expected = torch.rand(())
    torch.manual_seed(1)
    balance_by_time(layers, 2, torch.ones(4, 6))
    assert torch.equal(torch.rand(()), expected)
    assert all(torch.equal(value, before[name]) for name, value in layers.state_dict().items())
    assert all(p.grad is None for p in layers.parameters())


Measure = Callable[[nn.Sequential, int, Any], list[int]]
both = pytest.mark.parametrize("measure", [balance_by_time, balance_by_memory])


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
