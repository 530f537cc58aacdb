"""Finding what feeds a module by the keys of the batch's jagged tensors."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys.rewrite.find_direct import find_directly


def kjt(*keys: str) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=list(keys), values=torch.arange(len(keys)), lengths=torch.ones(len(keys), dtype=torch.int64)
    )


def test_the_one_jagged_tensor_with_all_features_is_taken() -> None:
    batch = {"x": kjt("a", "b", "c"), "y": kjt("d")}
    assert str(find_directly(batch, ["c", "a"])) == "batch['x']"


def test_the_one_with_just_the_features_goes_before_larger_ones() -> None:
    batch = {"x": kjt("a", "b", "c"), "y": kjt("b", "a")}
    assert str(find_directly(batch, ["a", "b"])) == "batch['y']"


def test_several_that_fit_are_named_and_none_is_taken() -> None:
    assert find_directly([kjt("a"), kjt("a")], ["a"]) == (
        "several keyed jagged tensors of the batch have its features ['a']: batch[0], batch[1]"
    )


def test_none_that_fits_is_said_with_what_there_is() -> None:
    assert find_directly({"x": kjt("a")}, ["a", "z"]) == (
        "no keyed jagged tensor of the batch has all of its features ['a', 'z']; found: batch['x'] with ['a']"
    )
    assert str(find_directly(torch.zeros(1), ["z"])).endswith("found: none")
