"""Walking a batch and following a path in the next one."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys.batches.traversal import (
    AttributeStep,
    ItemStep,
    format_path,
    get_at_path,
    is_same_leaf,
    iterate_leaves,
)

Pair = collections.namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(slots=True)
class Slotted:
    ids: Any


class Plain:
    def __init__(self, ids: Any) -> None:
        self.ids = ids
        self.name = "not a piece"


class Attrs:
    """As the attrs package leaves a class with slots: no ``__dict__``, fields in ``__attrs_attrs__``."""

    __slots__ = ("ids",)
    __attrs_attrs__ = (AttributeStep("ids"),)

    def __init__(self, ids: Any) -> None:
        self.ids = ids


def kjt(values: torch.Tensor | None = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["f"], values=torch.tensor([1, 2]) if values is None else values, lengths=torch.tensor([1, 1])
    )


@pytest.mark.parametrize(
    ("wrap", "path"),
    [
        (lambda x: x, "batch"),
        (lambda x: (x, 3), "batch[0]"),
        (lambda x: [None, x], "batch[1]"),
        (lambda x: {"ids": x}, "batch['ids']"),
        (lambda x: Pair("text", x), "batch.right"),
        (lambda x: Slotted(x), "batch.ids"),
        (lambda x: Plain(x), "batch.ids"),
        (lambda x: Attrs(x), "batch.ids"),
        (lambda x: [{"deep": Plain(Pair(x, None))}], "batch[0]['deep'].ids.left"),
    ],
)
@pytest.mark.parametrize("piece", [torch.zeros(2), kjt()])
def test_a_piece_is_found_and_found_again_in_the_next_batch(wrap: Any, path: str, piece: Any) -> None:
    found = list(iterate_leaves(wrap(piece)))
    assert [format_path(where) for where, _ in found] == [path]
    assert found[0][1] is piece
    following = kjt()
    assert get_at_path(found[0][0], wrap(following)) is following


def test_pieces_come_in_the_order_of_the_batch_and_a_jagged_tensor_is_not_looked_into() -> None:
    batch = {"b": kjt(), "a": [torch.zeros(1), torch.ones(1)]}
    assert [format_path(path) for path, _ in iterate_leaves(batch)] == ["batch['b']", "batch['a'][0]", "batch['a'][1]"]


def test_an_object_in_two_places_is_yielded_for_each_and_a_cycle_ends() -> None:
    piece = kjt()
    batch: dict[str, Any] = {"one": piece, "other": [piece]}
    batch["self"] = batch
    assert [format_path(path) for path, _ in iterate_leaves(batch)] == ["batch['one']", "batch['other'][0]"]


def test_a_path_that_a_batch_lacks_says_how_far_it_went() -> None:
    with pytest.raises(LookupError, match=r"batch\[0\] \(a dict\) has no \['ids'\]"):
        get_at_path((ItemStep(0), ItemStep("ids")), [{"other": 1}])
    with pytest.raises(LookupError, match=r"batch \(a tuple\) has no \.sparse"):
        get_at_path((AttributeStep("sparse"),), (1, 2))


def test_jagged_tensors_over_the_same_tensors_are_the_same_piece() -> None:
    one = kjt()
    wrapped = KeyedJaggedTensor(keys=one.keys(), values=one.values(), lengths=one.lengths())
    assert is_same_leaf(one, wrapped)
    assert not is_same_leaf(one, kjt(one.values().clone()))
    assert not is_same_leaf(one.values(), one.values().clone())
