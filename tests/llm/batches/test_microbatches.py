"""A batch as micro-batches: equal groups of rows, filled up with rows that train nothing, joined again."""

from __future__ import annotations

import re
from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.batches.microbatches import count_loss_tokens, split_batch
from lightning_pipe.llm.batches.padding import PadValues


def batch_of(rows: int, length: int = 3) -> dict[str, Any]:
    ids = torch.arange(rows * length).view(rows, length)
    return {
        "input_ids": ids,
        "labels": ids + 1,
        "mask": ids[:, None, None] > 1,
        "weight": torch.rand(rows),
        "name": "a",
    }


def packed(*ends: int) -> dict[str, Tensor]:
    ids = torch.arange(ends[-1])[None]
    return {"input_ids": ids, "labels": ids.clone(), "cu_seq_lens_q": torch.tensor((0, *ends))}


def test_rows_are_cut_into_equal_groups_in_their_order_and_the_rest_is_given_to_each() -> None:
    batch = batch_of(6)
    micro_batches = split_batch(batch, 3)
    assert (micro_batches.rows, micro_batches.padded_rows) == (6, 0)
    for index, item in enumerate(micro_batches.items):
        assert item["name"] == "a"
        for key in ("input_ids", "labels", "mask", "weight"):
            torch.testing.assert_close(item[key], batch[key][2 * index : 2 * index + 2], rtol=0, atol=0)


@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(1, 12), st.integers(1, 8))
def test_added_rows_are_copies_of_the_last_have_no_labels_and_are_trimmed(rows: int, num_microbatches: int) -> None:
    batch = batch_of(rows)
    micro_batches = split_batch(batch, num_microbatches)
    sizes = {len(item["input_ids"]) for item in micro_batches.items}
    assert len(micro_batches.items) == num_microbatches
    assert len(sizes) == 1
    assert sizes.pop() * num_microbatches == rows + micro_batches.padded_rows
    assert micro_batches.padded_rows < num_microbatches
    assert sum(count_loss_tokens(item["labels"]) for item in micro_batches.items) == count_loss_tokens(batch["labels"])
    whole = torch.cat([item["input_ids"] for item in micro_batches.items])
    assert (whole[rows:] == batch["input_ids"][-1]).all()
    for key in ("input_ids", "labels", "mask", "weight"):
        outputs = [item[key] for item in micro_batches.items]
        assert torch.equal(micro_batches.merge_outputs(outputs), batch[key])


def test_the_users_batch_is_left_as_it_was() -> None:
    batch = batch_of(3)
    before = {key: value.clone() if isinstance(value, Tensor) else value for key, value in batch.items()}
    split_batch(batch, 2).items[1]["new"] = 1
    assert list(batch) == list(before)
    assert all(torch.equal(batch[key], before[key]) for key in ("input_ids", "labels", "mask", "weight"))


@pytest.mark.parametrize("rows", [3, 5])
def test_strict_batches_must_fill_their_micro_batches(rows: int) -> None:
    with pytest.raises(InputError, match=rf"has {rows} rows.*num_microbatches=4.*a multiple of 4.*drop_last"):
        split_batch(batch_of(rows), 4, strict=True)
    assert split_batch(batch_of(8), 4, strict=True).padded_rows == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scale", torch.tensor(1.0)),
        ("mask", torch.ones(1, 1, 3, 3)),
        ("masks", {"full": torch.ones(4, 3)}),
        ("pieces", [1, (torch.ones(4, 3),)]),
    ],
)
def test_what_cannot_be_cut_by_rows_is_refused_by_name_for_several_micro_batches(key: str, value: Any) -> None:
    batch = {"input_ids": torch.ones(4, 3), key: value}
    with pytest.raises(InputError, match=rf"'{key}'.*num_microbatches=2.*4 rows.*a list of 2 micro-batches"):
        split_batch(batch, 2)
    (item,) = split_batch(batch, 1).items
    assert item[key] is value


@settings(max_examples=30, deadline=None, database=None)
@given(st.integers(1, 7), st.integers(2, 4))
def test_rows_are_cut_in_the_dimension_given_for_a_key(rows: int, num_microbatches: int) -> None:
    batch = batch_of(rows) | {"table": torch.rand(3), "boundaries": (torch.rand(2),)}
    dims = {"moved": 2, "input_ids": 1, "table": None, "boundaries": None}
    expected = split_batch(batch | {"boundaries": ()}, num_microbatches, PadValues(chunk_dims={"table": None})).items
    moved = batch | {"input_ids": batch["input_ids"].mT, "moved": batch["input_ids"].mT[None]}
    found = split_batch(moved, num_microbatches, PadValues(chunk_dims=dims))
    assert found.rows == rows
    for item, other in zip(found.items, expected, strict=True):
        assert torch.equal(item["input_ids"].mT, other["input_ids"])
        assert torch.equal(item["moved"][0].mT, other["input_ids"])
        assert torch.equal(item["labels"], other["labels"])
        assert item["table"] is batch["table"]
        assert item["boundaries"] is batch["boundaries"]


def test_a_dimension_that_does_not_have_the_rows_is_refused() -> None:
    for dims in ({"bias": 1}, {"bias": 3}):
        with pytest.raises(InputError, match=r"'bias', a tensor of shape \(4, 3\), .* dimension [13] is the batch"):
            split_batch(batch_of(4) | {"bias": torch.zeros(4, 3)}, 2, PadValues(chunk_dims=dims))


ENDS = [torch.tensor([0, 2, 5, 8]), torch.tensor([0, 8]), torch.tensor([0, 0, 3, 7])]


@pytest.mark.parametrize(
    "boundaries",
    [ENDS, tuple(ENDS), torch.tensor([0, 2, 5, 8, 16, 16, 19, 23]), torch.tensor([0, 2, 5, 8, 16, 19, 23]).int()],
    ids=["a list", "a tuple", "together", "together, without the empty document"],
)
def test_document_boundaries_are_cut_into_those_of_each_packed_row(boundaries: Any) -> None:
    batch = {"input_ids": torch.arange(24).view(3, 8), "cu_seq_lens_q": boundaries, "max_length_q": torch.tensor(8)}
    found = split_batch(batch, 4)
    assert found.padded_rows == 1
    assert [item["max_length_q"] for item in found.items] == [3, 8, 4, 4]
    for row, item in enumerate(found.items):
        assert item["input_ids"].shape == (1, 8)
        assert item["cu_seq_lens_q"].unique().tolist() == ENDS[min(row, 2)].unique().tolist()


@pytest.mark.parametrize(
    ("key", "value", "num_microbatches"),
    [
        ("cu_seq_lens_q", ENDS, 2),  # micro-batches of two rows
        ("cu_seq_lens_q", ENDS[:2], 3),
        ("cu_seq_lens_k", ENDS[0], 3),  # of the first row only
        ("cu_seq_lens_k", torch.tensor([0, 2, 5, 8, 19, 23]), 3),  # a document in two rows
        ("cu_seq_lens_q", torch.tensor([2, 5, 8, 16, 24]), 3),
        ("cu_seq_lens_q", torch.tensor([0, 2, 8, 16, 24, 32]), 3),  # of a larger batch
        ("cu_seq_lens_q", torch.tensor([-1, 0, 8, 16, 24]), 3),
        ("cu_seq_lens_q", torch.stack([ENDS[0], ENDS[0], ENDS[0]]), 3),
        ("max_length_q", 3, 3),
    ],
)
def test_boundaries_that_are_not_those_of_rows_are_refused(key: str, value: Any, num_microbatches: int) -> None:
    batch = {"input_ids": torch.ones(3, 8), key: value}
    message = rf"'{key}'.*for 3 packed rows of 8 tokens.*a list of 3 tensors.*one tensor from 0 to 24"
    for dims in ({}, {key: 0}):
        with pytest.raises(InputError, match=message):
            split_batch(batch, num_microbatches, PadValues(chunk_dims=dims))
    rows = [{"input_ids": torch.ones(1, 3), key: value} for _ in range(4)]
    assert all(item[key] is value for item in split_batch(rows, 4).items)


def test_the_boundaries_of_the_only_row_may_be_a_list() -> None:
    (item,) = split_batch({"input_ids": torch.ones(1, 8), "cu_seq_lens_q": ENDS[:1]}, 1).items
    assert torch.equal(item["cu_seq_lens_q"], ENDS[0])
    whole = {"input_ids": torch.ones(1, 8), "cu_seq_lens_q": ENDS[:1]}
    (item,) = split_batch(whole, 1, PadValues(chunk_dims={"cu_seq_lens_q": None})).items
    assert item["cu_seq_lens_q"] is whole["cu_seq_lens_q"]


@pytest.mark.parametrize(
    ("value", "dim"),
    [
        (torch.zeros(2, 3, 4), 2),
        (torch.zeros(2, 3), None),
        (torch.tensor(1.0), None),
        (np.zeros((4, 2)), None),
        ([torch.zeros(4)], None),
        ({"inner": torch.zeros(4)}, None),
    ],
)
def test_the_named_entry_of_chunk_dims_lets_the_value_be_cut(value: Any, dim: int | None) -> None:
    batch = {"input_ids": torch.ones(4, 3), "extra": value}
    with pytest.raises(InputError) as caught:
        split_batch(batch, 2)
    named = re.search(r"Name the dimension of its rows in batching.chunk_dims, such as (\d)", str(caught.value))
    assert (named and int(named[1])) == dim
    assert "batching.chunk_dims to None to give all of 'extra' to each micro-batch" in str(caught.value)
    assert split_batch(batch, 2, PadValues(chunk_dims={"extra": None})).items[1]["extra"] is value
    if dim is not None:
        item = split_batch(batch, 2, PadValues(chunk_dims={"extra": dim})).items[1]
        assert item["extra"].shape[dim] == 2


def test_outputs_may_be_none() -> None:
    joined = split_batch(batch_of(3), 2).merge_outputs([(torch.zeros(2), None), (torch.ones(2), None)])
    assert joined[0].tolist() == [0, 0, 1]
    assert joined[1] is None


def test_any_mapping_is_a_batch_and_rows_are_those_of_its_first_tensor_without_input_ids() -> None:
    batch = UserDict({"name": "a", "inputs_embeds": torch.ones(4, 3, 2), "flags": [1, 2]})
    items = split_batch(batch, 2).items
    assert [tuple(item["inputs_embeds"].shape) for item in items] == [(2, 3, 2)] * 2
    assert items[0]["flags"] == [1, 2]


def test_a_list_of_micro_batches_is_taken_as_it_is() -> None:
    batch = [packed(2, 5), packed(4)]
    micro_batches = split_batch(batch, 2, strict=True)
    assert (micro_batches.rows, micro_batches.padded_rows) == (2, 0)
    for item, given_item in zip(micro_batches.items, batch, strict=True):
        assert all(item[key] is value for key, value in given_item.items())


def test_a_short_list_is_filled_with_its_last_micro_batch_without_labels() -> None:
    batch = (packed(2, 5), packed(4))
    micro_batches = split_batch(batch, 4)
    assert (micro_batches.rows, micro_batches.padded_rows) == (2, 2)
    assert [count_loss_tokens(item["labels"]) for item in micro_batches.items] == [5, 4, 0, 0]
    assert torch.equal(micro_batches.items[3]["cu_seq_lens_q"], batch[1]["cu_seq_lens_q"])
    outputs = [torch.full((1, 2), float(index)) for index in range(4)]
    assert micro_batches.merge_outputs(outputs).tolist() == [[0, 0], [1, 1]]
    with pytest.raises(InputError, match=r"a list of 2 micro-batches; expected num_microbatches=4"):
        split_batch(batch, 4, strict=True)


def test_a_list_of_more_micro_batches_or_of_unequal_rows_is_refused() -> None:
    with pytest.raises(InputError, match=r"a list of 3 micro-batches; expected num_microbatches=2"):
        split_batch([packed(2), packed(2), packed(2)], 2)
    with pytest.raises(InputError, match=r"micro-batches have \[1, 2\] rows; expected the same number"):
        split_batch([packed(2), {"input_ids": torch.ones(2, 2)}], 2)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (torch.ones(4, 3), r"a tensor of shape \(4, 3\)"),
        ([torch.ones(4, 3), torch.ones(4)], r"a list of 2 \(Tensor\)"),
        ([], r"a list of 0"),
        ({}, r"the keys \[\] and no tensor with rows"),
        ({"a": 1, "b": torch.tensor(1)}, r"the keys \['a', 'b'\] and no tensor with rows"),
        ({"input_ids": torch.ones(0, 3)}, r"no rows"),
    ],
)
def test_a_batch_without_rows_is_refused(batch: Any, found: str) -> None:
    with pytest.raises(InputError, match=found):
        split_batch(batch, 2)


def test_outputs_that_are_not_rows_are_not_trimmed() -> None:
    micro_batches = split_batch(batch_of(3), 2)
    with pytest.raises(InputError, match=r"\[\(2, 1\), \(1, 1\)\].*2 tensors with a total of 4 rows"):
        micro_batches.merge_outputs([torch.ones(2, 1), torch.ones(1, 1)])
    with pytest.raises(InputError, match=r"\[\(4,\)\]"):
        micro_batches.merge_outputs([torch.ones(4)])
    with pytest.raises(InputError, match=r"\[\(\), \(\)\]"):
        micro_batches.merge_outputs([torch.tensor(1.0)] * 2)
