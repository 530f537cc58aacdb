"""Sequentials to be cut, and what they come to in one piece."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from lightning_pipe.pipe import pop, skippable, stash
from lightning_pipe.pipe.scatter import concat_micro_batch_outputs, count_batch_rows, scatter
from tests.rounding import Reference


@skippable(stash=["early", "late"])
class Leave(nn.Module):
    """Leaves what it is given, and twice that."""

    def forward(self, input: Tensor) -> Any:
        yield stash("early", input)
        yield stash("late", input * 2)
        return input


@skippable(pop=["early"])
class AddEarly(nn.Module):
    def forward(self, input: Tensor) -> Any:
        early = yield pop("early")
        return input + early


@skippable(pop=["late"])
class TimesLate(nn.Module):
    def forward(self, input: Tensor) -> Any:
        late = yield pop("late")
        return input * torch.tanh(late)


class Fork(nn.Module):
    """One tensor becomes a dictionary: of two, integers and a number."""

    def forward(self, input: Tensor) -> dict[str, Any]:
        largest = input.argmax(dim=1)
        return {"plain": input, "pair": (torch.sin(input), largest), "times": 2}


class Join(nn.Module):
    def forward(self, parts: dict[str, Any]) -> Tensor:
        sine, largest = parts["pair"]
        joined: Tensor = parts["plain"] * parts["times"] + sine * functional.one_hot(largest, sine.shape[1])
        return joined


def plain() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        OrderedDict(
            into=nn.Linear(6, 8), act=nn.Tanh(), middle=nn.Linear(8, 8), relu=nn.ReLU(inplace=True), out=nn.Linear(8, 3)
        )
    )


def with_skips() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(6, 8), Leave(), nn.Linear(8, 8), nn.Tanh(), AddEarly(), nn.Linear(8, 8), TimesLate(), nn.Linear(8, 3)
    )


def with_forms() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), Fork(), Join(), nn.Linear(8, 8), Fork(), Join(), nn.Linear(8, 3))


def with_attention() -> nn.Sequential:
    torch.manual_seed(4)
    layers = [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(
        nn.Linear(6, 8), nn.Unflatten(1, (2, 4)), nn.Linear(4, 8), *layers, nn.Flatten(), nn.Linear(16, 3)
    )


def with_frozen() -> nn.Sequential:
    model = plain()
    model[0].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    one.__name__: one for one in (plain, with_skips, with_forms, with_attention, with_frozen)
}


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)


def whole_forward(module: nn.Sequential, inputs: Any, chunks: int) -> Any:
    """The module on the same micro-batches, one after the other."""
    return concat_micro_batch_outputs([module(piece) for piece in scatter(inputs, chunks)])


def whole_loss(module: nn.Sequential, inputs: Any, targets: Any, loss_fn: Any, chunks: int) -> Tensor:
    """The mean loss, with a backward behind each micro-batch; returned without a graph."""
    total = torch.zeros(())
    for piece, target in zip(scatter(inputs, chunks), scatter(targets, chunks), strict=True):
        loss = loss_fn(module(piece), target)
        if (weight := count_batch_rows(piece) / count_batch_rows(inputs)) != 1.0:
            loss = loss * weight
        loss.backward()
        total = total + loss.detach()
    return total


def same(one: Any, other: Any) -> bool:
    """Whether two nestings of tensors are equal, to the bit."""
    mine, form = pytree.tree_flatten(one)
    theirs, other_form = pytree.tree_flatten(other)
    return form == other_form and all(
        torch.equal(left, right) if isinstance(left, Tensor) else left == right
        for left, right in zip(mine, theirs, strict=True)
    )


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Gradients by the names of parameters; parameters without a gradient are left out."""
    return {f"{name}.grad": one.grad.clone() for name, one in module.named_parameters() if one.grad is not None}


def whole_gradients(module: nn.Module, backward: Callable[[nn.Module], Any]) -> Reference:
    """Gradients without a pipe, to which those of a pipe are equal up to rounding."""

    def run() -> dict[str, Tensor]:
        copied = copy.deepcopy(module)
        backward(copied)
        return gradients(copied)

    return Reference.of(run)


def state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, and gradients beside them."""
    return {**module.state_dict(), **gradients(module)}


def different(one: nn.Module, other: nn.Module) -> list[str]:
    """Names of what is not equal to the bit."""
    mine, theirs = state(one), state(other)
    return sorted(
        {*mine} ^ {*theirs} | {name for name in {*mine} & {*theirs} if not torch.equal(mine[name], theirs[name])}
    )
