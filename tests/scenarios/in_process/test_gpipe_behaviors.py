"""What GPipe's users may rely on, as torchgpipe's tests state it, of this pipe: what test_pipe and others leave out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.pipe import Pipe

Make = Callable[..., Pipe]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes pipes that are closed in the end."""
    torch.manual_seed(0)
    made: list[Pipe] = []

    def one(layers: list[nn.Module], *arguments: Any, **options: Any) -> Pipe:
        made.append(Pipe(nn.Sequential(*layers), *arguments, **options))
        return made[-1]

    yield one
    for pipe in made:
        pipe.close()


class Calls(nn.Module):
    """A layer that is a function."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Any) -> Any:
        return self.function(input)


class Log(torch.autograd.Function):
    """Notes when it runs forward and backward."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, note: Callable[[str, Any], None]) -> Tensor:
        ctx.note = note
        note("forward", ctx)
        return input.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.note("backward", ctx)
        return gradient, None


def logging(note: Callable[[str, Any], None]) -> nn.Module:
    return Calls(lambda input: Log.apply(input, note))


# ---------------------------------------------------------------------- what it takes and gives


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_outputs_may_have_other_numbers_of_rows_than_inputs_and_each_other(make: Make, checkpoint: Any) -> None:
    pipe = make([Calls(lambda x: (x * 2, x.repeat(2, 1)))], 2, checkpoint, ["cpu"])
    input = torch.arange(3.0).unsqueeze(1).requires_grad_()
    doubled, repeated = pipe(input)
    assert doubled.flatten().tolist() == [0, 2, 4]
    assert repeated.flatten().tolist() == [0, 1, 0, 1, 2, 2]  # two rows in the first micro-batch, one in the other
    (doubled.sum() + (repeated * torch.arange(6.0).unsqueeze(1)).sum()).backward()
    assert input.grad is not None
    assert input.grad.flatten().tolist() == [2 + 0 + 2, 2 + 1 + 3, 2 + 4 + 5]


# ---------------------------------------------------------------------- running again, and gradients


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_outputs_require_grad_if_there_is_what_to_train(make: Make, checkpoint: Any) -> None:
    nothing = make([nn.Tanh(), nn.Linear(1, 1).requires_grad_(False)], 2, checkpoint, ["cpu"] * 2)
    assert not nothing(torch.rand(4, 1)).requires_grad
    pipe = make([nn.Tanh(), nn.Linear(1, 1), nn.Tanh()], 2, checkpoint, ["cpu"] * 3)
    pipe(input := torch.rand(4, 1)).sum().backward()
    assert all(p.grad is not None for p in pipe.parameters())
    assert input.grad is None


class Same(torch.autograd.Function):
    """Returns what it is given, the very tensor."""

    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        return input

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_function_may_return_its_input(make: Make, checkpoint: Any) -> None:
    pipe = make([Calls(Same.apply), Calls(Same.apply)], 2, checkpoint, ["cpu"] * 2)
    input = torch.rand(4, 1, requires_grad=True)
    output = pipe(input)
    assert torch.equal(output, input)
    (output * 2).sum().backward()
    assert input.grad is not None
    assert torch.equal(input.grad, torch.full((4, 1), 2.0))


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_graphs_are_freed_with_backward_or_with_the_outputs(make: Make, checkpoint: Any) -> None:
    graphs: list[weakref.ref[Any]] = []
    layers = [logging(lambda what, ctx: graphs.append(weakref.ref(ctx))), nn.Linear(1, 1)]
    pipe = make(layers, 4, checkpoint, ["cpu"] * 2)
    output = pipe(torch.rand(8, 1, requires_grad=True))
    assert checkpoint == "always" or any(graph() is not None for graph in graphs)
    output.sum().backward()
    assert all(graph() is None for graph in graphs)
    del output
    pipe(torch.rand(8, 1, requires_grad=True))
    assert all(graph() is None for graph in graphs)


# ---------------------------------------------------------------------- who runs what, and when


def test_a_partition_takes_micro_batches_in_order_each_behind_its_neighbor(make: Make) -> None:
    pipe = make([nn.Linear(1, 1) for _ in range(3)], 5, "never", ["cpu"] * 3)
    pipe.start_trace()
    pipe(torch.rand(5, 1)).sum().backward()
    spans = {(span.task, span.iteration): span for span in pipe.stop_trace()}
    for what, partitions, numbers in (
        ("Forward", [0, 1, 2], [0, 1, 2, 3, 4]),
        ("Backward", [2, 1, 0], [4, 3, 2, 1, 0]),
    ):
        for place, partition in enumerate(partitions):
            for turn, number in enumerate(numbers):
                begin = spans[f"{what}{partition}", number].start_order
                if turn:
                    assert begin > spans[f"{what}{partition}", numbers[turn - 1]].end_order
                if place:
                    assert begin > spans[f"{what}{partitions[place - 1]}", number].end_order
