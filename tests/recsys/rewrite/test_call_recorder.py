"""Finding what feeds a module by identity with the pieces of the first batch, or by the keys of jagged tensors."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys.modules.call_arguments import CallArguments, PostprocessResults
from lightning_pipe.recsys.rewrite.call_recorder import Recorder
from lightning_pipe.recsys.rewrite.resolution import find_arguments_by_keys


def kjt() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))


def test_the_argument_of_a_call_is_found_in_later_batches() -> None:
    batch: dict[str, Any] = {"x": torch.zeros(1), "sparse": [kjt(), kjt()]}
    recorder = Recorder(batch)
    recorder.record_call("a", (batch["sparse"][1],), {})
    recorder.record_call("b", (), {"features": batch["sparse"][0], "more": None})
    found = recorder.arguments("a")
    assert isinstance(found, CallArguments)
    assert str(found) == "batch['sparse'][1]"
    following: dict[str, Any] = {"x": torch.zeros(1), "sparse": [kjt(), kjt()]}
    positional, named = found.resolve(following, PostprocessResults({}))
    assert positional == (following["sparse"][1],)
    assert named == {}
    assert str(recorder.arguments("b")) == "features=batch['sparse'][0], more=None"


def test_a_batch_that_the_step_changes_is_recorded_as_it_came() -> None:
    batch = {"sparse": kjt()}
    came = batch["sparse"]
    recorder = Recorder(batch)
    batch["sparse"] = kjt()
    recorder.record_call("a", (came,), {})
    recorder.record_call("b", (batch["sparse"],), {})
    assert str(recorder.arguments("a")) == "batch['sparse']"
    assert recorder.arguments("b") == (
        "its argument, a KeyedJaggedTensor with the keys ['f'], is not an object of the batch: the step made it"
    )


def test_a_jagged_tensor_wrapped_anew_around_the_same_tensors_counts_as_the_piece() -> None:
    batch = (kjt(),)
    recorder = Recorder(batch)
    one = batch[0]
    recorder.record_call("a", (KeyedJaggedTensor(keys=["f"], values=one.values(), lengths=one.lengths()),), {})
    assert str(recorder.arguments("a")) == "batch[0]"


def test_a_module_called_twice_or_never_has_a_reason_and_no_arguments() -> None:
    batch = (kjt(),)
    recorder = Recorder(batch)
    recorder.record_call("a", batch, {})
    recorder.record_call("a", batch, {})
    assert recorder.arguments("a") == "was called 2 times in the first step"
    assert recorder.arguments("b") == "was not called in the first step"
    assert recorder.get_recorded_arguments("a") is None
    assert recorder.get_recorded_arguments("b") is None


# By keys.


def of_keys(*keys: str) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=list(keys), values=torch.arange(len(keys)), lengths=torch.ones(len(keys), dtype=torch.int64)
    )


def test_the_one_jagged_tensor_with_all_features_is_taken() -> None:
    batch = {"x": of_keys("a", "b", "c"), "y": of_keys("d")}
    assert str(find_arguments_by_keys(batch, ["c", "a"])) == "batch['x']"


def test_the_one_with_just_the_features_goes_before_larger_ones() -> None:
    batch = {"x": of_keys("a", "b", "c"), "y": of_keys("b", "a")}
    assert str(find_arguments_by_keys(batch, ["a", "b"])) == "batch['y']"


def test_several_that_fit_are_named_and_none_is_taken() -> None:
    assert find_arguments_by_keys([of_keys("a"), of_keys("a")], ["a"]) == (
        "several keyed jagged tensors of the batch have its features ['a']: batch[0], batch[1]"
    )


def test_none_that_fits_is_said_with_what_there_is() -> None:
    assert find_arguments_by_keys({"x": of_keys("a")}, ["a", "z"]) == (
        "no keyed jagged tensor of the batch has all of its features ['a', 'z']; found: batch['x'] with ['a']"
    )
    assert str(find_arguments_by_keys(torch.zeros(1), ["z"])).endswith("found: none")
