"""Features compared with the first batch's."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.recsys.modules.feature_checks import (
    FeatureForm,
    IdLimit,
    check_ids,
    check_lengths,
    conform_features,
    refuse_trainable_feature_weights,
    shallow_copy_features,
)


def kjt(
    keys: list[str], rows: list[list[int]], weights: torch.Tensor | None = None, dtype: torch.dtype = torch.int64
) -> KeyedJaggedTensor:
    """One sample; the ids of each key."""
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.tensor([value for row in rows for value in row], dtype=dtype),
        lengths=torch.tensor([len(row) for row in rows]),
        weights=weights,
    )


def variable(keys: list[str], ids: list[list[int]], inverse: dict[str, list[int]]) -> KeyedJaggedTensor:
    """A batch size per feature: one id a row, ``inverse`` maps samples to rows."""
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.tensor([value for row in ids for value in row]),
        lengths=torch.ones(sum(map(len, ids)), dtype=torch.int64),
        stride_per_key_per_rank=[[len(row)] for row in ids],
        inverse_indices=(list(inverse), torch.tensor(list(inverse.values()))),
    )


FIRST = kjt(["a", "b"], [[1], [2, 3]])


def test_the_same_form_is_passed_on_as_the_same_object() -> None:
    later = kjt(["a", "b"], [[], [5]])
    assert conform_features("m", later, FeatureForm.from_features(FIRST)) is later


def test_keys_in_another_order_are_put_into_the_first_batch_s() -> None:
    later = kjt(["b", "a"], [[2, 3], [1]], weights=torch.tensor([0.2, 0.3, 0.1]))
    form = FeatureForm.from_features(kjt(["a", "b"], [[1], [2, 3]], weights=torch.zeros(3)))
    ordered = conform_features("m", later, form)
    assert ordered.keys() == ["a", "b"]
    assert ordered.values().tolist() == [1, 2, 3]
    assert ordered.weights().tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_variable_batch_sizes_are_re_ordered_with_their_inverse_indices() -> None:
    form = FeatureForm.from_features(variable(["a", "b"], [[1], [2, 3]], {"a": [0, 0], "b": [1, 0]}))
    later = variable(["b", "a"], [[2, 3], [1]], {"b": [1, 0], "a": [0, 0]})
    ordered = conform_features("m", later, form)
    assert ordered.keys() == ["a", "b"]
    assert ordered.stride_per_key() == [1, 2]
    names, indices = ordered.inverse_indices()
    assert names == ["a", "b"]
    assert indices.tolist() == [[0, 0], [1, 0]]


def test_missing_and_extra_keys_are_named() -> None:
    with pytest.raises(InputError, match=r"'m' expected .* got \['a', 'c'\]: missing \['b'\], extra \['c'\]"):
        conform_features("m", kjt(["a", "c"], [[1], [2]]), FeatureForm.from_features(FIRST))
    with pytest.raises(InputError, match=r"missing \[\], extra \['c'\]"):
        conform_features("m", kjt(["a", "b", "c"], [[1], [2], []]), FeatureForm.from_features(FIRST))


@pytest.mark.parametrize(
    ("later", "what"),
    [
        (kjt(["a", "b"], [[1], []], weights=torch.ones(1)), "with weights"),
        (kjt(["a", "b"], [[1], []], dtype=torch.int32), "torch.int32"),
        (variable(["a", "b"], [[1], [2, 3]], {"a": [0, 0], "b": [1, 0]}), "a batch size per feature"),
    ],
)
def test_another_form_is_refused_with_both_forms_named(later: KeyedJaggedTensor, what: str) -> None:
    with pytest.raises(InputError, match=f"form of its first batch,.*without weights, one batch size.* got .*{what}"):
        conform_features("m", later, FeatureForm.from_features(FIRST))


def test_weights_that_require_grad_are_refused_with_what_to_use_instead() -> None:
    refuse_trainable_feature_weights("m", kjt(["a"], [[1]], weights=torch.ones(1)))
    with pytest.raises(InputError, match=r"'m'.*FeatureProcessedEmbeddingBagCollection"):
        refuse_trainable_feature_weights("m", kjt(["a"], [[1]], weights=torch.ones(1, requires_grad=True)))


def test_an_id_beyond_its_table_is_named_with_feature_table_and_rows() -> None:
    tables = {"a": IdLimit("ta", 2), "b": IdLimit("tb", 4)}
    check_ids("m", kjt(["a", "b", "free"], [[0, 1], [3, 0], [99]]), tables)
    with pytest.raises(InputError, match=r"feature 'b' has the id 4, .* table 'tb' of sharded module 'm' has 4 rows"):
        check_ids("m", kjt(["a", "b"], [[1], [3, 4]]), tables)
    with pytest.raises(InputError, match="feature 'a' has the id -1"):
        check_ids("m", kjt(["b", "a"], [[3, 3], [0, -1]]), tables)
    with pytest.raises(InputError, match="feature 'a' has the id 2"):
        check_ids("m", kjt(["a", "b"], [[2], [3]], dtype=torch.int32), tables)


def malformed(**changes: Any) -> KeyedJaggedTensor:
    """Three keys with two samples each and six ids, with some arguments replaced."""
    arguments = {"values": torch.arange(6), "lengths": torch.tensor([1, 1, 2, 0, 0, 2]), **changes}
    return KeyedJaggedTensor(["a", "b", "c"], **arguments)


OF_SIZES = [[2], [1], [3]]
# Malformed features, and the problem in the message.
MISFITS: dict[str, tuple[KeyedJaggedTensor, str]] = {
    "a length is missing": (malformed(lengths=torch.tensor([1, 1, 2, 0, 2])), "have 5 lengths, expected 3 for 3 keys"),
    "no lengths": (malformed(lengths=None), "have neither lengths nor offsets"),
    "another number of samples": (malformed(stride=3), "have 6 lengths, expected 9 for 3 keys with 3 samples for each"),
    "too many ids": (malformed(values=torch.arange(8)), "have 8 ids, but their lengths add up to 6"),
    "too few ids": (malformed(values=torch.arange(5)), "have 5 ids, but their lengths add up to 6"),
    "too few weights": (malformed(weights=torch.ones(5)), "have 6 ids, but 5 weights"),
    "sums that are shifted": (
        malformed(length_per_key=[3, 1, 2]),
        r"have length_per_key \[3, 1, 2\], but their lengths add up to \[2, 2, 2\]",
    ),
    "offsets of keys that are shifted": (
        malformed(offset_per_key=[0, 3, 4, 6]),
        r"have offset_per_key \[0, 3, 4, 6\], but their lengths add up to \[2, 2, 2\]",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_lengths_that_do_not_fit_are_said_with_module_and_keys(name: str) -> None:
    features, problem = MISFITS[name]
    with pytest.raises(InputError, match=rf"features \['a', 'b', 'c'\] of sharded module 'm' {problem}"):
        check_lengths("m", features)


# Features whose sums are right, and the problem in the message if every length is read.
WRONG_LENGTHS: dict[str, tuple[KeyedJaggedTensor, str]] = {
    "negative": (
        malformed(lengths=torch.tensor([1, 1, 3, -1, 0, 2])),
        "have the length -1 for key 'b' in sample 1",
    ),
    "offsets that begin late": (
        malformed(lengths=None, offsets=torch.tensor([1, 2, 3, 5, 5, 5, 7])),
        "have offsets that begin with 1, expected 0",
    ),
    "other offsets": (
        malformed(offsets=torch.tensor([0, 0, 2, 4, 4, 4, 6])),
        "have offsets that differ from the sums of their lengths",
    ),
}


@pytest.mark.parametrize("name", WRONG_LENGTHS)
def test_a_wrong_length_among_right_sums_is_said_if_every_length_is_read(name: str) -> None:
    features, problem = WRONG_LENGTHS[name]
    check_lengths("m", features)
    with pytest.raises(InputError, match=rf"features \['a', 'b', 'c'\] of sharded module 'm' {problem}"):
        check_lengths("m", features, every_length=True)


def of_lengths(*lengths: int) -> JaggedTensor:
    return JaggedTensor(torch.arange(sum(lengths)), lengths=torch.tensor(lengths, dtype=torch.int64))


OF_ONE_SIZE = {"a": of_lengths(1, 2), "b": of_lengths(0, 0), "c": of_lengths(3, 1)}
HEALTHY: dict[str, Callable[[], KeyedJaggedTensor]] = {
    "lengths": malformed,
    "weights": lambda: malformed(weights=torch.ones(6)),
    "offsets": lambda: malformed(lengths=None, offsets=torch.tensor([0, 1, 2, 4, 4, 4, 6])),
    "lengths and offsets": lambda: malformed(offsets=torch.tensor([0, 1, 2, 4, 4, 4, 6])),
    "sums": lambda: malformed(length_per_key=[2, 2, 2], offset_per_key=[0, 2, 4, 6], stride=2),
    "synchronized": lambda: malformed().sync(),
    "no ids": lambda: malformed(values=torch.empty(0, dtype=torch.int64), lengths=torch.zeros(6, dtype=torch.int64)),
    "no keys": KeyedJaggedTensor.empty,
    "a size per feature": lambda: malformed(stride_per_key_per_rank=OF_SIZES),
    "a size per feature, inverse": lambda: variable(["a", "b"], [[1], [2, 3]], {"a": [0, 0], "b": [1, 0]}),
    "of a dictionary": lambda: KeyedJaggedTensor.from_jt_dict(OF_ONE_SIZE),
    "permuted": lambda: malformed(weights=torch.ones(6)).permute([2, 0]),
    "unpickled": lambda: pickle.loads(pickle.dumps(malformed().sync())),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_features_that_fit_are_not_refused(name: str) -> None:
    features = HEALTHY[name]()
    check_lengths("m", features)
    check_lengths("m", features, every_length=True)
    check_lengths("m", features.to(torch.device("cpu")), every_length=True)


def test_weights_put_on_a_copy_leave_the_batch_without() -> None:
    batch = kjt(["a"], [[1, 2]])
    batch["a"]  # jagged tensors are cached on the batch's object
    copied = shallow_copy_features(batch)
    copied._weights = torch.ones(2)
    assert copied["a"].weights().tolist() == [1.0, 1.0]
    assert batch.weights_or_none() is None
    weighted = kjt(["a"], [[1, 2]], weights=torch.zeros(2))
    shallow_copy_features(weighted).weights().fill_(5.0)
    assert weighted.weights().tolist() == [0.0, 0.0]
