"""The bound for another implementation covers every correct rounding, grows with the condition, and finds faults."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.rounding import Perturbed, Reference

EPS = torch.finfo(torch.float32).eps


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def trained(steps: int = 5, lr: float = 0.1, skipped: int | None = None, backwards: bool = False) -> dict[str, Tensor]:
    """A small network after a few steps of Adagrad; ``backwards`` adds the terms of all products in another order."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(24, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    optimizer = torch.optim.Adagrad(network.parameters(), lr=lr)
    if backwards:
        # The same function: features and hidden units in reverse.
        first, _, last = network
        assert isinstance(first, nn.Linear)
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            first.weight.copy_(first.weight.flip(0).flip(1))
            first.bias.copy_(first.bias.flip(0))
            last.weight.copy_(last.weight.flip(1))
    for step in range(steps):
        x = draw(8, 24, seed=step)
        if step == skipped:
            x[0] = 0.0
        optimizer.zero_grad()
        network(x.flip(0).flip(1) if backwards else x).square().mean().backward()
        optimizer.step()
    values = {name: value.detach().clone() for name, value in network.named_parameters()}
    if backwards:
        values["0.weight"] = values["0.weight"].flip(0).flip(1)
        values["2.weight"] = values["2.weight"].flip(1)
        for name in ("0.bias", "1.weight", "1.bias"):
            values[name] = values[name].flip(0)
    # Batch normalization takes away what the bias adds: its gradient is rounding and nothing else.
    del values["0.bias"]
    return values


def test_every_operation_is_off_by_its_last_place_in_forward_backward_and_optimizer() -> None:
    x = draw(50).requires_grad_()
    optimizer = torch.optim.SGD([x], lr=0.1)
    plain = x.detach().clone()
    with Perturbed(0):
        y = x.detach() * 3.7
        y_in_place = x.detach().clone().mul_(3.7)
        x.sin().sum().backward()
        gradient = x.grad.clone() if x.grad is not None else torch.empty(0)
        optimizer.step()
    for found, expected in [(y, plain * 3.7), (y_in_place, plain * 3.7), (gradient, plain.cos())]:
        off = ((found - expected) / expected).abs()
        assert (off > 0).double().mean() > 0.3  # two operations in a row may cancel
        assert off.max() < 4 * EPS  # the gradient has two operations
    assert not torch.equal(x, plain - 0.1 * gradient)


def test_training_in_another_order_of_additions_is_within_the_bound() -> None:
    found, plain = trained(backwards=True), trained()
    assert any(not torch.equal(value, plain[name]) for name, value in found.items())
    assert Reference.of(trained).differences(found) == []


@pytest.mark.parametrize("fault", [{"lr": 0.1003}, {"skipped": 4}], ids=str)
def test_a_small_fault_is_outside_the_bound(fault: dict[str, float]) -> None:
    reference = Reference.of(trained)
    assert reference.differences(trained(**fault)) != []  # type: ignore[arg-type]


def test_what_is_missing_of_another_shape_or_no_number_differs() -> None:
    reference = Reference.of(lambda: {"one": [1.0, 2.0], "other": torch.ones(3)})
    assert reference.differences({"one": [1.0, 2.0], "other": torch.ones(3), "more": 1.0}) == []
    assert reference.differences({"one": [1.0, 2.0]}) == ["other: missing"]
    (problem,) = reference.differences({"one": [1.0], "other": torch.ones(3)})
    assert problem.startswith("one: expected at most")
    assert problem.endswith("got inf")
    (problem,) = reference.differences({"one": [1.0, 2.0], "other": torch.full((3,), math.nan)})
    assert problem.endswith("got nan")


def test_a_result_that_is_mostly_rounding_is_refused() -> None:
    x = draw(10)
    with pytest.raises(AssertionError, match="expected rounding to move difference by at most"):
        Reference.of(lambda: {"difference": (x * 1e4 + 0.3) - x * 1e4})
