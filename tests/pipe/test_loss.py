"""``pipe.loss`` is the loss of the mini-batch, whatever its mean is over."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_pipe.engine import InputError
from lightning_pipe.pipe import Pipe, compute_pipe_or_module_loss
from tests.pipe.models import gradients, whole_gradients
from tests.rounding import Reference

ROWS, CLASSES = 10, 5


@pytest.fixture
def pair() -> Iterator[tuple[Pipe, nn.Sequential]]:
    """A pipe, and the same layers without."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    plain = copy.deepcopy(layers)
    pipe = Pipe(layers, 4, "always", ["cpu", "cpu"])
    yield pipe, plain
    pipe.close()


Pair = tuple[Pipe, nn.Sequential]


def classes(left_out: int = 0) -> Tensor:
    targets = torch.arange(ROWS) % CLASSES
    targets[:left_out] = -100
    return targets


def assert_same(pair: Pair, targets: Any, loss_fn: Any, **options: Any) -> None:
    """Losses and gradients of the pipe are those of the whole mini-batch."""
    pipe, plain = pair
    inputs = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(2))
    loss = pipe.loss(inputs, targets, loss_fn, **options)
    assert Reference.of(lambda: {"loss": loss_fn(plain(inputs), targets)}).differences({"loss": loss}) == []
    pipe.zero_grad()
    loss.backward()
    expected = whole_gradients(plain, lambda plain: loss_fn(plain(inputs), targets).backward())
    assert expected.differences(gradients(pipe)) == []


@pytest.mark.parametrize("left_out", [0, 1, 4, 9])
@pytest.mark.parametrize("weight", [None, torch.arange(1.0, 1 + CLASSES)])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_cross_entropy_is_over_the_targets_that_count(
    pair: Pair, left_out: int, weight: Tensor | None, smoothing: float
) -> None:
    assert_same(pair, classes(left_out), nn.CrossEntropyLoss(weight, label_smoothing=smoothing))


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(ignore_index=2),
        nn.CrossEntropyLoss(reduction="sum"),
        functional.cross_entropy,
        partial(functional.cross_entropy, reduction="sum"),
    ],
)
def test_cross_entropies_in_other_words(pair: Pair, loss_fn: Any) -> None:
    ignored = getattr(loss_fn, "ignore_index", -100)
    assert_same(pair, classes(3) if ignored < 0 else classes(), loss_fn)


def test_a_negative_log_likelihood_leaves_out_as_well(pair: Pair) -> None:
    for module in pair:
        module.add_module("3", nn.LogSoftmax(1))
    pipe = Pipe(nn.Sequential(*pair[0]), 4, devices=["cpu", "cpu"])
    assert_same((pipe, pair[1]), classes(3), nn.NLLLoss())
    pipe.close()


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), nn.MSELoss(), nn.KLDivLoss(reduction="batchmean")])
def test_targets_that_are_probabilities_count_by_rows(pair: Pair, loss_fn: Any) -> None:
    assert_same(pair, torch.rand(ROWS, CLASSES, generator=torch.Generator().manual_seed(3)), loss_fn)


def test_targets_of_which_none_counts_are_as_in_pytorch(pair: Pair) -> None:
    assert pair[0].loss(torch.randn(ROWS, 4), classes(ROWS), nn.CrossEntropyLoss()).isnan()


def test_a_function_that_says_nothing_is_taken_for_the_mean_that_it_is(pair: Pair) -> None:
    assert_same(pair, torch.randn(ROWS, CLASSES), lambda output, target: (output - target).abs().mean())
    assert_same(pair, torch.randn(ROWS, CLASSES), pair_of_means)


def pair_of_means(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean() + output.abs().mean()


def summed(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target, reduction="sum")


def of_some(output: Tensor, target: Tensor) -> Tensor:
    counts = target[:, 0] > 0
    return (output[counts] - target[counts]).square().mean()


@pytest.mark.parametrize(
    ("loss_fn", "said"), [(summed, "a sum .*pass reduction='sum'"), (of_some, "neither a mean nor a sum")]
)
def test_a_function_that_is_no_mean_over_rows_is_refused_before_it_trains_anything(
    pair: Pair, loss_fn: Callable[[Tensor, Tensor], Tensor], said: str
) -> None:
    targets = torch.randn(ROWS, CLASSES, generator=torch.Generator().manual_seed(4))
    targets[:, 0] = torch.tensor([1.0, 2.0, -1.0, 3.0, -1.0, 1.0, 1.0, -2.0, 1.0, 1.0])
    with pytest.raises(InputError, match=said):
        pair[0].loss(torch.randn(ROWS, 4), targets, loss_fn)
    assert all(parameter.grad is None for parameter in pair[0].parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_over_what_differs_little_between_rows_is_told_from_a_mean_over_rows(dtype: torch.dtype) -> None:
    """As at the beginning of training, when all rows have nearly the same loss."""
    layer = nn.Linear(4, CLASSES, dtype=dtype)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    nn.init.constant_(layer.bias[0], 0.05)  # the only difference between losses
    pipe = Pipe(nn.Sequential(layer), 1, devices=["cpu"])
    inputs, targets = torch.ones(256, 4, dtype=dtype), torch.ones(256, dtype=torch.long)
    targets[:100], targets[100:128] = CLASSES - 1, 0

    def counted(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.float(), target, ignore_index=CLASSES - 1)

    def rows(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.float(), target, label_smoothing=0.1)

    with pytest.raises(InputError, match="neither a mean nor a sum"):
        pipe.loss(inputs, targets, counted)
    pipe.loss(inputs, targets, rows)
    pipe.loss(inputs, targets, lambda output, target: functional.cross_entropy(output, target))
    pipe.close()


def test_what_is_said_to_be_a_sum_or_a_mean_is_taken_for_it(pair: Pair) -> None:
    targets = torch.randn(ROWS, CLASSES)
    assert_same(pair, targets, summed, reduction="sum")
    inputs = torch.randn(ROWS, 4)
    five = Pipe(copy.deepcopy(pair[1]), 5, devices=["cpu"])
    expected = Reference.of(lambda: {"loss": summed(pair[1](inputs), targets) / 5})  # the mean over micro-batches
    assert expected.differences({"loss": five.loss(inputs, targets, summed, reduction="mean")}) == []
    five.close()


def test_no_rows_have_no_loss(pair: Pair) -> None:
    with pytest.raises(InputError, match="the inputs have 0 rows"):
        pair[0].loss(torch.randn(0, 4), torch.randn(0, CLASSES), nn.MSELoss())


def test_without_a_pipe_the_loss_is_as_ever(pair: Pair) -> None:
    inputs, targets = torch.randn(ROWS, 4), classes(3)
    expected = functional.cross_entropy(pair[1](inputs), targets)
    assert torch.equal(compute_pipe_or_module_loss(pair[1], inputs, targets, nn.CrossEntropyLoss()), expected)
    rounded = Reference.of(lambda: {"loss": functional.cross_entropy(pair[1](inputs), targets)})
    assert (
        rounded.differences({"loss": compute_pipe_or_module_loss(pair[0], inputs, targets, nn.CrossEntropyLoss())})
        == []
    )
