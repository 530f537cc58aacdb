"""Layers that draw random numbers, in threads that share one generator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine import SetupError
from lightning_pipe.pipe import Pipe
from tests.pipe.models import different, same

CHECKPOINT: tuple[Any, ...] = ("always", "except_last", "never")


class Noise(nn.Module):
    """Draws in three ways: one tells a device, one has a tensor, one changes in place."""

    def forward(self, input: Tensor) -> Tensor:
        return input * torch.rand(input.shape, device="cpu") + torch.randn_like(input) + torch.empty(1).uniform_()


def random_layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(6, 32),
        nn.Dropout(0.4),
        nn.Linear(32, 32),
        Noise(),
        nn.Dropout(0.2),
        nn.Linear(32, 32),
        nn.RReLU(),
        nn.Linear(32, 3),
    )


def steps(pipe: Pipe, through: str = "forward", count: int = 4) -> list[Tensor]:
    """What some steps give, and the user's next random number."""
    torch.manual_seed(7)
    given = []
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(count):
        inputs, targets = torch.randn(12, 6), torch.randn(12, 3)
        optimizer.zero_grad()
        if through == "forward":
            loss = nn.functional.mse_loss(pipe(inputs), targets)
        else:
            loss = pipe.loss(inputs, targets, nn.MSELoss())
        loss.backward()
        optimizer.step()
        given.append(loss.detach())
    pipe.close()
    return [*given, torch.rand(())]


@pytest.mark.parametrize("through", ["forward", "loss"])
def test_a_seed_gives_the_same_numbers_in_every_mode_and_however_layers_are_shared_out(through: str) -> None:
    one = Pipe(random_layers(), 4, "never", ["cpu"])
    expected = steps(one, through)
    assert len({float(loss) for loss in expected}) == len(expected)
    for checkpoint in CHECKPOINT:
        for partitions in (2, 3, 4):
            other = Pipe(random_layers(), 4, checkpoint, ["cpu"] * partitions)
            assert same(steps(other, through), expected), (checkpoint, partitions)
            assert different(one, other) == [], (checkpoint, partitions)


def test_a_loss_draws_the_same_however_layers_are_shared_out_and_not_what_a_layer_draws() -> None:
    drawn: list[Tensor] = []

    class Draws(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            drawn.append(torch.rand(1))
            return input

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        drawn.append(torch.rand(1))
        return output.square().mean()

    found = []
    for partitions in (1, 2, 3, 4):
        torch.manual_seed(7)
        pipe = Pipe(nn.Sequential(*(Draws() for _ in range(4))), 1, "never", ["cpu"] * partitions)
        drawn.clear()
        pipe.loss(torch.ones(2, 1, requires_grad=True), torch.ones(2, 1), loss_fn, reduction="mean").backward()
        pipe.close()
        found.append([one.item() for one in drawn])
    assert found == [found[0]] * 4
    assert len(set(found[0])) == len(found[0]) == 5


@pytest.mark.parametrize("through", ["forward", "loss"])
@pytest.mark.parametrize("checkpoint", CHECKPOINT)
def test_gradients_are_those_of_the_masks_of_forward(checkpoint: Any, through: str) -> None:
    # Of a product of masks and inputs, the gradient of the input says what the masks were.
    pipe = Pipe(nn.Sequential(nn.Dropout(0.5), nn.Identity(), nn.Dropout(0.3)), 4, checkpoint, ["cpu"] * 3)
    for _ in range(20):
        inputs = torch.randn(16, 64, requires_grad=True)
        if through == "forward":
            output = pipe(inputs)
            output.sum().backward()
        else:
            found: list[Tensor] = []

            def loss_fn(output: Tensor, target: Tensor, found: list[Tensor] = found) -> Tensor:
                if output.requires_grad:  # behind a forward that keeps no graph there is another one
                    found.append(output.detach())
                return output.sum()

            pipe.loss(inputs, torch.zeros(16), loss_fn, reduction="sum").backward()
            output = torch.cat(found)
        assert inputs.grad is not None
        assert torch.equal(inputs.detach() * inputs.grad, output.detach())
        assert 0.5 < (output == 0).double().mean() < 0.8
    pipe.close()


def test_layers_that_draw_nothing_leave_the_users_numbers_alone() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 3)).eval(), 2, devices=["cpu"] * 2)
    torch.manual_seed(3)
    inputs = torch.randn(8, 6)
    expected = torch.rand(())
    torch.manual_seed(3)
    torch.randn(8, 6)
    pipe(inputs)
    assert torch.equal(torch.rand(()), expected)
    pipe.close()


class Uneven(nn.Module):
    """Attention whose dropout is told with each call."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(input, input, input, dropout_p=self.dropout)


def test_attention_with_dropout_has_masks_of_its_own() -> None:
    layers = nn.Sequential(nn.Linear(8, 8), Uneven(0.5), nn.Linear(8, 8))
    inputs = torch.randn(4, 5, 8)
    inputs[2:] = inputs[:2]
    found = []
    for devices in (1, 3):
        torch.manual_seed(3)
        pipe = Pipe(layers, 2, "always", ["cpu"] * devices)
        found.append(pipe(inputs))
        pipe.close()
    assert torch.equal(*found)
    assert not torch.equal(found[0][:2], found[0][2:])


def test_a_layer_that_begins_to_draw_later_is_refused() -> None:
    class Sometimes(nn.Module):
        draw = False

        def forward(self, input: Tensor) -> Tensor:
            return input + torch.rand(()) if self.draw else input

    layer = Sometimes()
    pipe = Pipe(nn.Sequential(nn.Identity(), layer), 2, devices=["cpu"] * 2)
    pipe(torch.ones(4, 2))
    layer.draw = True
    with pytest.raises(SetupError, match="drew none for its first micro-batch"):
        pipe(torch.ones(4, 2))
    pipe.close()
