"""The order of gradients in DDP's buckets, in a process that has trained and in one that continues for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_pipe.strategies.gradient_order import gradient_order, settle_gradient_order
from tests.distributed import run_ranks


class Backwards(nn.Module):
    """Registers its layers in another order than it uses them in."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.middle = nn.Linear(4, 1), nn.Linear(3, 4), nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.middle(self.first(x)))
        return y


def model() -> DistributedDataParallel:
    torch.manual_seed(3)
    return DistributedDataParallel(Backwards())


def step(model: DistributedDataParallel, rank: int, number: int) -> list[Tensor]:
    """The averaged gradients of a step."""
    model.zero_grad()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * number + rank))
    model(x).square().sum().backward()
    return [one.grad.clone() for one in model.parameters() if one.grad is not None]


def continued(rank: int, world: int) -> dict[str, Any]:
    before = model()
    step(before, rank, 0)
    at_first = gradient_order(before)
    second = step(before, rank, 1)
    order = gradient_order(before)

    after = model()
    settle_gradient_order(after, order)
    left = [one.grad for one in after.parameters()]
    restored = gradient_order(after)
    again = step(after, rank, 1)

    other = model()
    settle_gradient_order(other, [*order[:-1], "no such"])
    return {
        "orders": (at_first, order, restored, gradient_order(other)),
        "left": left,
        "equal": all(torch.equal(one, two) for one, two in zip(second, again, strict=True)),
    }


def test_a_continued_process_has_the_order_and_the_gradients_of_the_one_before() -> None:
    for found in run_ranks(continued, 3):
        at_first, order, restored, other = found["orders"]
        assert order != at_first
        assert restored == order
        assert found["equal"]
        assert set(found["left"]) == {None}
        assert other == at_first
