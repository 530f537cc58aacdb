"""What GPipe's users may rely on of skip connections, as torchgpipe's tests state it: what test_skip leaves out."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_pipe.engine import SetupError
from lightning_pipe.pipe import Namespace, Pipe, isolate, pop, skippable, stash
from lightning_pipe.pipe.skip import find_skip_routes
from tests.pipe.models import AddEarly, Leave, TimesLate
from tests.pipe.test_skip import pops, stashes


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def pipe_of(layers: Sequence[nn.Module], chunks: int, checkpoint: Any = "except_last", **options: Any) -> closing[Pipe]:
    """A pipe on CPUs, a partition for each layer if nothing else is said; closed in the end."""
    balance = options.pop("balance", [1] * len(layers))
    return closing(Pipe(nn.Sequential(*layers), chunks, checkpoint, ["cpu"] * len(balance), balance, **options))


@skippable(stash=["b"], pop=["a"])
class PopsAndStashes(nn.Module):
    """Ends one skip and begins another."""

    def forward(self, input: Tensor) -> Any:
        value = yield pop("a")
        yield stash("b", input * value)
        return input


# ---------------------------------------------------------------------- where they lead


def test_a_name_that_was_popped_is_stashed_again_only_in_another_namespace() -> None:
    with pytest.raises(SetupError, match="'a' is stashed by layer 0 and 2"):
        find_skip_routes([[stashes("a")], [pops("a")], [stashes("a")], [pops("a")]])
    one, other = Namespace(), Namespace()
    layers = [isolate(stashes("a"), one), isolate(pops("a"), one), isolate(stashes("a"), other)]
    with pipe_of([*layers, isolate(pops("a"), other)], 2) as pipe:
        assert torch.equal(pipe(torch.ones(2, 1)), torch.full((2, 1), 9.0))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_of_a_module_keep_its_namespaces_apart(copied: Callable[[nn.Module], nn.Module]) -> None:
    one, other = Namespace(), Namespace()
    layers = nn.Sequential(*(isolate(Leave(), namespace) for namespace in (one, other)))
    layers.extend([isolate(AddEarly(), other), isolate(TimesLate(), one), isolate(TimesLate(), other)])
    layers.append(isolate(AddEarly(), one))
    input = torch.rand(2, 3)
    assert torch.equal(copied(layers)(input), layers(input))


# ---------------------------------------------------------------------- what they bring


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_a_layer_may_end_one_skip_and_begin_another(checkpoint: Any) -> None:
    input = torch.full((4, 1), 3.0, requires_grad=True)
    with pipe_of([stashes("a"), PopsAndStashes(), pops("b")], 2, checkpoint) as pipe:
        output = pipe(input)  # 2x + 2x * x
        assert torch.equal(output, torch.full((4, 1), 24.0))
        output.sum().backward()
    assert input.grad is not None
    assert torch.equal(input.grad, torch.full((4, 1), 14.0))


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("training", [True, False])
def test_what_was_stashed_is_freed_with_backward_or_at_once_without_one(training: bool, checkpoint: Any) -> None:
    stashed: list[StorageWeakRef] = []

    @skippable(stash=["twice"])
    class Stash(nn.Module):
        def forward(self, input: Tensor) -> Any:
            twice = input * 2
            stashed.append(StorageWeakRef(twice.untyped_storage()))
            yield stash("twice", twice)
            return input

    @skippable(pop=["twice"])
    class Pop(nn.Module):
        def forward(self, input: Tensor) -> Any:
            return input * (yield pop("twice"))

    with pipe_of([Stash(), nn.Identity(), Pop()], 2, checkpoint) as pipe:
        pipe.train(training)
        with torch.set_grad_enabled(training):
            output = pipe(torch.rand(10, 1, requires_grad=True))
        assert len(stashed) == 2
        assert any(not one.expired() for one in stashed) == training
        if training:
            output.sum().backward()
        assert all(one.expired() for one in stashed)
