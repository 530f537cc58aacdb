"""Outputs of sharded modules come in the order of the unsharded ones."""

from __future__ import annotations

import pytest
import torch
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
)

from lightning_pipe.engine import InputError
from tests.recsys.sharding_cases import shard

NAMES = ["a", "b", "c"]
# TorchRec puts tables of one sharding type side by side: a, c, b.
CONSTRAINTS = {name: {"sharding_types": ["row_wise" if name == "b" else "table_wise"]} for name in NAMES}
FEATURES = KeyedJaggedTensor(
    ["x", "y"], torch.tensor([1, 2, 3, 0, 4, 5]), lengths=torch.tensor([1, 2, 0, 3])
)  # two features, two samples
TABLES = {"a": ["x"], "b": ["y", "x"], "c": ["y"]}


class Bags(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=name, embedding_dim=4 * (index + 1), num_embeddings=8, feature_names=TABLES[name]
                )
                for index, name in enumerate(NAMES)
            ]
        )


class Sequences(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=name, embedding_dim=4, num_embeddings=8, feature_names=TABLES[name])
                for name in NAMES
            ]
        )


@pytest.mark.usefixtures("one_rank")
def test_pooled_outputs_have_the_unsharded_columns_and_carry_gradients() -> None:
    model = Bags()
    expected = model.inner(FEATURES)
    shard(model, constraints=CONSTRAINTS)
    found = model.inner(FEATURES).wait()
    assert found.keys() == expected.keys() == ["x@a", "y@b", "x@b", "y@c"]
    assert found.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(found.values(), expected.values())
    assert found.values().requires_grad


@pytest.mark.usefixtures("one_rank")
def test_pooled_outputs_taken_by_key_are_not_copied_and_agree_with_those_taken_whole() -> None:
    model = Bags()
    expected = model.inner(FEATURES).to_dict()
    shard(model, constraints=CONSTRAINTS)
    found = model.inner(FEATURES).wait()
    by_key = found.to_dict()
    assert list(by_key) == list(expected)
    assert by_key["y@c"].untyped_storage().data_ptr() == found["x@a"].untyped_storage().data_ptr()
    whole = found.values()
    for name, values in expected.items():
        torch.testing.assert_close(by_key[name], values)
        assert torch.equal(found[name], by_key[name])
        assert found[name].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    regrouped = KeyedTensor.regroup([found], [["y@c"], ["x@a", "x@b", "y@b"]])
    torch.testing.assert_close(regrouped[0], expected["y@c"])


@pytest.mark.usefixtures("one_rank")
def test_sequence_outputs_are_a_dictionary_in_the_unsharded_order() -> None:
    model = Sequences()
    expected = model.inner(FEATURES)
    shard(model, constraints=CONSTRAINTS)
    found = model.inner(FEATURES).wait()
    assert list(found) == list(expected)
    for name, values in expected.items():
        torch.testing.assert_close(found[name].values(), values.values())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("build", [Bags, Sequences])
def test_what_is_no_keyed_jagged_tensor_is_refused_by_name(build: type[torch.nn.Module]) -> None:
    model = build()
    shard(model, constraints=CONSTRAINTS)
    with pytest.raises(InputError, match=r"module 'inner' expected a KeyedJaggedTensor .*\['x', 'y'.* got a Tensor"):
        model.get_submodule("inner")(FEATURES.values())
