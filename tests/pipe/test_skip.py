"""Skip connections in a plain Sequential, in a pipe, and where they lead nowhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine import SetupError
from lightning_pipe.pipe import Namespace, Pipe, isolate, pop, skippable, stash
from lightning_pipe.pipe.skip import find_skip_routes


def stashes(name: str) -> nn.Module:
    @skippable(stash=[name])
    class Stash(nn.Module):
        def forward(self, input: Tensor) -> Any:
            yield stash(name, input)
            return input * 2

    return Stash()


def pops(name: str) -> nn.Module:
    @skippable(pop=[name])
    class Pop(nn.Module):
        def forward(self, input: Tensor) -> Any:
            value = yield pop(name)
            return input + value

    return Pop()


def test_a_plain_sequential_passes_skips_too() -> None:
    layers = nn.Sequential(stashes("a"), nn.Identity(), pops("a"))
    assert torch.equal(layers(torch.ones(2)), torch.full((2,), 3.0))
    assert torch.equal(layers(torch.ones(2)), torch.full((2,), 3.0))


@pytest.mark.parametrize("balance", [[1, 1, 1], [2, 1], [1, 2], [3]])
def test_a_pipe_brings_a_skip_to_where_it_is_popped_and_its_gradient_back(balance: list[int]) -> None:
    pipe = Pipe(
        nn.Sequential(stashes("a"), nn.Identity(), pops("a")), 2, devices=["cpu"] * len(balance), balance=balance
    )
    inputs = torch.ones(4, 2, requires_grad=True)
    output = pipe(inputs)
    output.sum().backward()
    assert torch.equal(output, torch.full((4, 2), 3.0))
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, torch.full((4, 2), 3.0))
    pipe.close()


def test_layers_inside_of_layers_have_skips() -> None:
    inner = nn.Sequential(nn.Identity(), stashes("a"))
    assert len(find_skip_routes([[inner], [nn.Sequential(pops("a"))]])) == 1
    pipe = Pipe(nn.Sequential(inner, nn.Sequential(pops("a"))), 2, devices=["cpu"] * 2)
    assert torch.equal(pipe(torch.ones(2, 2)), torch.full((2, 2), 3.0))
    pipe.close()


def test_a_skip_may_be_any_nesting_of_tensors_and_other_values() -> None:
    @skippable(stash=["all"])
    class Stash(nn.Module):
        def forward(self, input: Tensor) -> Any:
            yield stash("all", {"both": (input, input.argmax(dim=1)), "scale": 3, "nothing": None})
            return input

    @skippable(pop=["all"])
    class Pop(nn.Module):
        def forward(self, input: Tensor) -> Any:
            value = yield pop("all")
            assert value["nothing"] is None
            return input + value["both"][0] * value["scale"] + value["both"][1].unsqueeze(1)

    pipe = Pipe(nn.Sequential(Stash(), nn.Identity(), Pop()), 2, devices=["cpu"] * 3)
    inputs = torch.eye(4, requires_grad=True)
    pipe(inputs).sum().backward()
    assert inputs.grad is not None
    assert torch.equal(inputs.grad, torch.full((4, 4), 4.0))
    pipe.close()


def test_namespaces_keep_one_name_apart() -> None:
    one, other = Namespace(), Namespace()
    layers = nn.Sequential(
        isolate(stashes("a"), one), isolate(stashes("a"), other), isolate(pops("a"), one), isolate(pops("a"), other)
    )
    whole = layers(torch.ones(2, 1))
    pipe = Pipe(layers, 2, devices=["cpu"] * 4)
    assert torch.equal(pipe(torch.ones(2, 1)), whole)
    assert len(find_skip_routes([[layer] for layer in layers])) == 2
    pipe.close()


def test_a_namespace_for_some_names_leaves_the_others() -> None:
    @skippable(stash=["a", "b"])
    class Both(nn.Module):
        def forward(self, input: Tensor) -> Any:
            yield stash("a", input)
            yield stash("b", input * 10)
            return input

    namespace = Namespace()
    layers = nn.Sequential(isolate(Both(), namespace, only=["a"]), isolate(pops("a"), namespace), pops("b"))
    assert torch.equal(layers(torch.ones(1)), torch.full((1,), 12.0))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        # Layers and partitions are not counted alike.
        (["plain", "stash a", "plain", "plain"], "'a' is stashed by layer 1 and popped by no layer"),
        (["plain", "plain", "plain", "pop a"], "'a' is stashed by no layer and popped by layer 3"),
        (["stash a", "stash a", "pop a"], "'a' is stashed by layer 0 and 1 and popped by layer 2"),
        (["stash a", "plain", "pop a", "pop a"], "'a' is stashed by layer 0 and popped by layer 2 and 3"),
        (["plain", "pop a", "plain", "stash a"], "'a' is stashed by layer 3 and popped by layer 1"),
    ],
)
def test_skips_that_lead_nowhere_are_refused_when_the_pipe_is_made(layers: list[str], message: str) -> None:
    kinds = {"stash": stashes, "pop": pops}
    made = [nn.Identity() if kind == "plain" else kinds[kind.split()[0]](kind.split()[1]) for kind in layers]
    with pytest.raises(SetupError, match=message):
        Pipe(nn.Sequential(*made), 2, devices=["cpu"] * 2)


def test_a_layer_does_what_it_declares() -> None:
    @skippable(stash=["a"])
    class Forgets(nn.Module):
        def forward(self, input: Tensor) -> Any:
            if input.dim() > 5:
                yield stash("a", input)
            return input

    @skippable(stash=["a"])
    class Twice(nn.Module):
        def forward(self, input: Tensor) -> Any:
            yield stash("a", input)
            yield stash("a", input)
            return input

    @skippable(pop=["a"])
    class Other(nn.Module):
        def forward(self, input: Tensor) -> Any:
            value = yield pop("b")
            return value

    @skippable(pop=["a"])
    class Value(nn.Module):
        def forward(self, input: Tensor) -> Any:
            yield input
            return input

    one = torch.ones(1)
    with pytest.raises(SetupError, match=r"Forgets.forward ended and did not stash 'a'"):
        Forgets()(one)
    with pytest.raises(SetupError, match=r"Twice.forward yields stash\('a'\), which it .* has already .* name \(a\)"):
        Twice()(one)
    with pytest.raises(SetupError, match=r"Other.forward yields pop\('b'\), which it does not declare"):
        Other()(one)
    with pytest.raises(SetupError, match=r"Value.forward yields .*Tensor.*; expected stash\(name, value\) or pop"):
        Value()(one)


def test_what_cannot_be_skippable_is_refused() -> None:
    with pytest.raises(SetupError, match="single name 'abc'"):
        skippable(stash="abc")
    with pytest.raises(SetupError, match="forward of the skippable layer Linear has no yield"):
        skippable(stash=["a"])(type("Linear", (nn.Linear,), {}))
