"""Values that are captured are copies, through any nesting, and what is given of them is new each time."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.engine.runtime.captured import ByReference, take_snapshot


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Frozen:
    values: Tensor
    more: list[Tensor] = field(default_factory=list)


class Slotted:
    __slots__ = ("name", "values")

    def __init__(self, values: Tensor) -> None:
        self.name, self.values = "slotted", values


def two() -> Tensor:
    return torch.tensor([1.0, 2.0])


NESTED: dict[str, tuple[Any, Any]] = {
    "a tensor": (lambda: two(), lambda found: found),
    "a list": (lambda: [1, two()], lambda found: found[1]),
    "a tuple of tuples": (lambda: ((two(),), "x"), lambda found: found[0][0]),
    "a named tuple": (lambda: Pair(two(), None), lambda found: found.left),
    "a dict of dicts": (lambda: {"a": {"b": two()}}, lambda found: found["a"]["b"]),
    "an ordered dict": (lambda: OrderedDict(a=two()), lambda found: found["a"]),
    "a deque": (lambda: deque([two()], maxlen=3), lambda found: found[0]),
    "a frozen dataclass": (lambda: Frozen(two()), lambda found: found.values),
    "a list in a dataclass": (lambda: Frozen(torch.zeros(1), [two()]), lambda found: found.more[0]),
    "an object in an object": (lambda: Frozen(Slotted(two())), lambda found: found.values.values),  # type: ignore[arg-type]
    "slots": (lambda: Slotted(two()), lambda found: found.values),
    "a keyed jagged tensor": (
        lambda: KeyedJaggedTensor(["k"], two(), lengths=torch.tensor([2])),
        lambda found: found.values(),
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_tensors_are_copied_through_any_nesting(name: str) -> None:
    make, tensor_of = NESTED[name]
    value = make()
    kept = take_snapshot(value)
    tensor_of(value).add_(10)
    first = kept.copy_captured_value()
    assert type(first) is type(value)
    assert tensor_of(first).tolist() == [1.0, 2.0]
    tensor_of(first).mul_(7)
    assert tensor_of(kept.copy_captured_value()).tolist() == [1.0, 2.0]


def test_containers_are_new_each_time() -> None:
    kept = take_snapshot({"numbers": [1, 2]})
    kept.copy_captured_value()["numbers"].append(3)
    assert kept.copy_captured_value() == {"numbers": [1, 2]}
    bounded = take_snapshot(deque([1], maxlen=2)).copy_captured_value()
    assert bounded.maxlen == 2


def test_what_is_held_twice_is_one_object_in_what_is_given() -> None:
    tensor, numbers = two(), [1]
    found = take_snapshot((tensor, [tensor], numbers, numbers)).copy_captured_value()
    assert found[0] is found[1][0]
    assert found[2] is found[3]
    assert found[0] is not tensor


def test_an_object_that_holds_itself_is_rebuilt_around_itself() -> None:
    holder: Any = Pair.__new__  # any function: kept as it is
    node = type("Node", (), {})()
    node.values, node.own, node.function = two(), node, holder
    found = take_snapshot(node).copy_captured_value()
    assert found is not node
    assert found.own is found
    assert found.function is holder


def test_what_holds_no_tensor_is_kept_as_it_is() -> None:
    lock, module, generator = threading.Lock(), nn.Linear(1, 1), torch.Generator()
    settings = type("Settings", (), {})()
    settings.numbers = [1]
    parameter = next(module.parameters())
    for value in (lock, module, generator, settings, parameter, None, 3, "text", torch.float32):
        assert take_snapshot(value).copy_captured_value() is value


def test_by_reference_nothing_is_copied() -> None:
    tensor = two()
    assert take_snapshot([ByReference(tensor)]).copy_captured_value()[0] is tensor


def test_gradients_are_grafted_on_tensors_that_had_some_and_on_no_others() -> None:
    weights = torch.ones(2, requires_grad=True)
    kept = take_snapshot({"with": weights * 2, "without": two()})
    plain = kept.copy_captured_value()
    assert not plain["with"].requires_grad
    grafted = kept.copy_captured_value(lambda tensor: tensor * weights)
    assert grafted["with"].requires_grad
    assert not grafted["without"].requires_grad


def test_tensors_of_inference_mode_are_copied_each_time() -> None:
    with torch.inference_mode():
        kept = take_snapshot(two())
        kept.copy_captured_value().add_(1)
        assert kept.copy_captured_value().tolist() == [1.0, 2.0]
