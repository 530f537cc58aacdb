"""A pipe trains as its Sequential does on the same micro-batches: to the bit, and on whole batches up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.pipe import Pipe
from tests.pipe.models import (
    MODELS,
    batch,
    different,
    gradients,
    same,
    whole_forward,
    whole_gradients,
    whole_loss,
)
from tests.rounding import Reference
from tests.tiers import sampled, wanted

ALL = [(chunks, partitions) for chunks in (1, 2, 3, 7, 8) for partitions in (1, 2, 3, 4)]
SOME = [(1, 2), (2, 4), (3, 3), (7, 2), (8, 4)]
CHECKPOINT = ("always", "except_last", "never")
ROWS = (8, 13, 16, 5)  # uneven ones, and fewer than micro-batches


pytestmark = pytest.mark.filterwarnings("ignore:a mini-batch has")


def trained(
    module: nn.Module, step: Callable[[Tensor, Tensor], Any], steps: int = 10
) -> tuple[list[Any], torch.optim.Optimizer]:
    """What each step gave."""
    optimizer = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], lr=0.01)
    given = []
    for number in range(steps):
        optimizer.zero_grad()
        given.append(step(*batch(ROWS[number % len(ROWS)], number)))
        optimizer.step()
    return given, optimizer


def combinations(config: pytest.Config, name: str) -> list[tuple[int, int]]:
    """Numbers of micro-batches and of partitions: for two models all, of which a default run has each number."""
    return wanted(config, ALL, (*SOME, (3, 1)).__contains__) if name in ("plain", "with_skips") else SOME


@pytest.mark.parametrize("through", ["forward", "loss"])
@pytest.mark.parametrize("checkpoint", sampled(CHECKPOINT, lambda mode: mode == "except_last"))
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_equal_the_sequentials_on_the_same_micro_batches(
    name: str, checkpoint: Any, through: str, request: pytest.FixtureRequest
) -> None:
    for chunks, partitions in combinations(request.config, name):
        pipe = Pipe(MODELS[name](), chunks, checkpoint, ["cpu"] * partitions)
        whole = MODELS[name]()

        def in_pipe(inputs: Tensor, targets: Tensor, pipe: Pipe = pipe) -> Tensor:
            output = pipe(inputs) if through == "forward" else pipe.loss(inputs, targets, nn.MSELoss())
            loss = nn.functional.mse_loss(output, targets) if through == "forward" else output
            loss.backward()
            return output.detach()

        def in_one(inputs: Tensor, targets: Tensor, whole: nn.Sequential = whole, chunks: int = chunks) -> Tensor:
            if through == "loss":
                return whole_loss(whole, inputs, targets, nn.MSELoss(), chunks)
            output = whole_forward(whole, inputs, chunks)
            nn.functional.mse_loss(output, targets).backward()
            return output.detach()

        assert same(trained(pipe, in_pipe)[0], trained(whole, in_one)[0]), (chunks, partitions)
        assert different(pipe, whole) == [], (chunks, partitions)
        pipe.close()


@pytest.mark.parametrize("through", ["forward", "loss"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_those_of_the_whole_batch_up_to_rounding(name: str, through: str) -> None:
    batches = [batch(13, number) for number in range(3)]

    def backward(whole: nn.Module) -> None:
        for inputs, targets in batches:
            nn.functional.mse_loss(whole(inputs), targets).backward()

    pipe, expected = Pipe(MODELS[name](), 3, devices=["cpu"] * 3), whole_gradients(MODELS[name](), backward)
    for inputs, targets in batches:
        if through == "forward":
            nn.functional.mse_loss(pipe(inputs), targets).backward()
        else:
            pipe.loss(inputs, targets, nn.functional.mse_loss).backward()
    assert gradients(pipe).keys() == expected.values.keys()
    assert expected.differences(gradients(pipe)) == []
    pipe.close()


@pytest.mark.parametrize("through", ["forward", "loss"])
@pytest.mark.parametrize("checkpoint", sampled(CHECKPOINT, lambda mode: mode == "except_last"))
def test_gradients_reach_what_made_the_input(checkpoint: Any, through: str) -> None:
    torch.manual_seed(0)
    before, other = nn.Linear(6, 6), nn.Linear(6, 6)
    other.load_state_dict(before.state_dict())
    pipe, whole = Pipe(MODELS["plain"](), 4, checkpoint, ["cpu"] * 2), MODELS["plain"]()
    inputs, targets = batch(13)
    if through == "forward":
        nn.functional.mse_loss(pipe(before(inputs)), targets).backward()
        nn.functional.mse_loss(whole_forward(whole, other(inputs), 4), targets).backward()
        assert different(before, other) == []
    else:
        expected = whole_gradients(
            other, lambda other: nn.functional.mse_loss(whole(other(inputs)), targets).backward()
        )
        pipe.loss(before(inputs), targets, nn.functional.mse_loss).backward()
        assert expected.differences(gradients(before)) == []
    pipe.close()


def test_outputs_without_grad_equal_the_sequentials() -> None:
    pipe, whole = Pipe(MODELS["with_skips"](), 3, devices=["cpu"] * 3), MODELS["with_skips"]()
    inputs, targets = batch(13)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert same(pipe(inputs), whole_forward(whole, inputs, 3))
            assert not pipe(inputs).requires_grad
    with torch.no_grad():
        loss = pipe.loss(inputs, targets, nn.MSELoss())
        expected = Reference.of(lambda: {"loss": nn.functional.mse_loss(whole(inputs), targets)})
    assert not loss.requires_grad
    assert expected.differences({"loss": loss}) == []
    nn.functional.mse_loss(pipe(inputs), targets).backward()  # inference has left nothing behind
    pipe.close()


def test_a_loss_is_scaled_and_accumulated_like_any_other() -> None:
    pipe = Pipe(MODELS["plain"](), 3, devices=["cpu"] * 2)
    batches = [batch(8, seed) for seed in range(2)]

    def backward(whole: nn.Module) -> None:
        for inputs, targets in batches:
            (nn.functional.mse_loss(whole(inputs), targets) / 2 * 1024).backward()

    for inputs, targets in batches:
        (pipe.loss(inputs, targets, nn.MSELoss()) / 2 * 1024).backward()
    assert whole_gradients(MODELS["plain"](), backward).differences(gradients(pipe)) == []
    pipe.close()


def test_autograd_grad_gives_gradients_and_leaves_grad_alone() -> None:
    pipe, whole = Pipe(MODELS["plain"](), 3, devices=["cpu"] * 2), MODELS["plain"]()
    inputs, targets = batch(8)
    mine = torch.autograd.grad(nn.functional.mse_loss(pipe(inputs), targets), [*pipe.parameters()])
    theirs = torch.autograd.grad(
        nn.functional.mse_loss(whole_forward(whole, inputs, 3), targets), [*whole.parameters()]
    )
    assert same(list(mine), list(theirs))
    assert all(p.grad is None for p in pipe.parameters())
    pipe.close()
