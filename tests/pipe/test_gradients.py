"""Sums of gradients: in the order in which they come, and never in memory that others read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.pipe import Pipe
from lightning_pipe.pipe.gradients import GradientSums


def test_a_first_gradient_that_another_parameter_shares_stays_as_it_is() -> None:
    sums, first, second = GradientSums(), torch.zeros(2), torch.zeros(2)
    shared = torch.tensor([1.0, 2.0])
    sums.add(first, shared)
    sums.add(second, shared)
    for gradient in ([10.0, 20.0], [100.0, 200.0]):
        sums.add(first, torch.tensor(gradient))
    found = sums.get(first), sums.get(second)
    assert [None if one is None else one.tolist() for one in found] == [[111.0, 222.0], [1.0, 2.0]]


def test_a_sparse_gradient_and_a_dense_one_are_added() -> None:
    sums, parameter = GradientSums(), torch.zeros(3)
    sparse = torch.tensor([0.0, 2.0, 0.0]).to_sparse()
    for gradient in (sparse, sparse, torch.ones(3), sparse):
        sums.add(parameter, gradient)
    found = sums.get(parameter)
    assert found is not None
    assert found.tolist() == [1.0, 7.0, 1.0]


class AddsTwo(nn.Module):
    """Autograd gives both parameters one tensor as their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, 3))
        self.u = nn.Parameter(torch.zeros(1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w + self.u


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_parameters_that_are_added_have_their_own_gradients_over_micro_batches(checkpoint: Any) -> None:
    # A row in each micro-batch: nothing is summed before the gradients of parameters are.
    rows = torch.arange(12.0).reshape(4, 3)
    pipe = Pipe(nn.Sequential(AddsTwo(), AddsTwo()), 4, checkpoint, ["cpu"] * 2)
    (pipe(rows) * rows).sum().backward()
    assert [(name, p.grad is not None and p.grad.tolist()) for name, p in pipe.named_parameters()] == [
        (name, [[18.0, 22.0, 26.0]]) for name, _ in pipe.named_parameters()
    ]
    pipe.close()
