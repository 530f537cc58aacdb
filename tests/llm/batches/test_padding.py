"""Sequence lengths: agreed on, rounded, padded to; documents and masks stay right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.batches.padding import (
    PadValues,
    pad_microbatch,
)
from tests.llm.document_masks import block_diagonal_mask
from tests.rounding import Reference


def micro_batch_of(rows: int, length: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows * 100 + length)
    ids = torch.randint(1, 50, (rows, length), generator=generator)
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(length).expand(rows, length),
        "inputs_embeds": torch.randn(rows, length, 4, generator=generator),
        "name": "a",
    }


def packed(lengths: list[int]) -> dict[str, Any]:
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    longest = max(lengths)
    documents = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    return {"input_ids": torch.ones(1, sum(lengths), dtype=torch.long), **documents}


@settings(max_examples=60, deadline=None, database=None)
@given(st.integers(1, 3), st.integers(1, 9), st.integers(0, 9))
def test_padding_comes_at_the_end_and_cutting_it_off_gives_the_sequences_back(
    rows: int, length: int, more: int
) -> None:
    micro_batch = micro_batch_of(rows, length)
    padded = pad_microbatch(micro_batch, length + more, PadValues(extra_pad_values={"inputs_embeds": 0.5}))
    values = {"input_ids": 0, "labels": -100, "attention_mask": 0, "position_ids": 0, "inputs_embeds": 0.5}
    for key, value in values.items():
        assert torch.equal(padded[key][:, :length], micro_batch[key])
        assert padded[key].shape[1] == length + more
        assert (padded[key][:, length:] == value).all()
        assert padded[key].dtype == micro_batch[key].dtype
    assert padded["name"] == "a"


def test_the_length_follows_the_dimension_of_the_rows() -> None:
    micro_batch = micro_batch_of(2, 3) | {"position_ids": torch.arange(18).view(3, 2, 3)}
    keys = PadValues(chunk_dims={"position_ids": 1})
    padded = pad_microbatch(micro_batch, 5, keys)["position_ids"]
    assert padded.shape == (3, 2, 5)
    assert torch.equal(padded[..., :3], micro_batch["position_ids"])
    assert not padded[..., 3:].any()
    assert (
        keys.get_microbatch_rows_and_length(micro_batch)
        == keys.get_microbatch_rows_and_length({"position_ids": micro_batch["position_ids"]})
        == (2, 3)
    )


@settings(max_examples=60, deadline=None, database=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 9))
def test_the_last_document_takes_in_the_padding(lengths: list[int], more: int) -> None:
    micro_batch = packed(lengths)
    before = micro_batch["cu_seq_lens_q"].clone()
    length = sum(lengths) + more
    padded = pad_microbatch(micro_batch, length)
    expected = [*lengths[:-1], lengths[-1] + more]
    for ends, longest in (("cu_seq_lens_q", "max_length_q"), ("cu_seq_lens_k", "max_length_k")):
        assert padded[ends].diff().tolist() == expected
        assert sum(expected) == length
        assert padded[ends].dtype == torch.int32
        assert padded[longest] == max(expected)
        assert isinstance(padded[longest], int)
    assert torch.equal(micro_batch["cu_seq_lens_q"], before)


def test_documents_that_end_before_the_row_are_extended_though_the_length_fits() -> None:
    padded = pad_microbatch({"input_ids": torch.ones(1, 6), "cu_seq_lens_q": torch.tensor([0, 2, 4])}, 6)
    assert padded["cu_seq_lens_q"].tolist() == [0, 2, 6]


def test_the_longest_document_keeps_its_type_and_is_not_added_where_it_was_missing() -> None:
    ends = torch.tensor([0, 2, 3])
    micro_batch = {"input_ids": torch.ones(1, 3), "cu_seq_lens_q": ends, "max_length_q": torch.tensor(2).int()}
    padded = pad_microbatch(micro_batch | {"cu_seq_lens_k": ends}, 7)
    assert torch.equal(padded["max_length_q"], torch.tensor(5).int())
    assert padded["max_length_q"].dtype == torch.int32
    assert "max_length_k" not in padded
    assert "attention_mask" not in padded


@pytest.mark.parametrize("shape", [(2, 3, 3), (2, 1, 3, 3), (1, 4, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32, torch.bfloat16])
def test_a_square_mask_lets_nothing_attend_to_padding_but_padding_itself(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    causal = torch.ones(3, 3).tril().bool()
    additive = dtype.is_floating_point
    mask = torch.zeros(3, 3, dtype=dtype).masked_fill(~causal, -torch.inf) if additive else causal.to(dtype)
    padded = pad_microbatch({"input_ids": torch.ones(2, 3), "attention_mask": mask.expand(shape)}, 5)["attention_mask"]
    assert padded.dtype == dtype
    assert padded.shape == (*shape[:-2], 5, 5)
    attends = padded == 0 if additive else padded.bool()
    expected = torch.block_diag(causal, torch.eye(2, dtype=torch.bool)).bool()
    assert (attends == expected).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_attention_of_real_tokens_is_the_same_under_a_padded_mask_and_its_gradients_are_numbers(
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    states = torch.randn(1, 2, 8, 4, requires_grad=True)
    mask = block_diagonal_mask(torch.tensor([0, 2, 5]), 5, dtype)
    padded = pad_microbatch({"input_ids": torch.ones(1, 5), "attention_mask": mask}, 8)["attention_mask"]
    real = states[:, :, :5]
    expected = Reference.of(lambda: {"real": F.scaled_dot_product_attention(real, real, real, attn_mask=mask)})
    found = F.scaled_dot_product_attention(states, states, states, attn_mask=padded)
    assert expected.differences({"real": found[:, :, :5]}) == []
    (gradient,) = torch.autograd.grad(found[:, :, :5].sum(), [states])
    assert gradient.isfinite().all()
    assert (gradient[:, :, 5:] == 0).all()


@pytest.mark.parametrize(
    ("micro_batch", "message"),
    [
        ({"input_ids": torch.ones(1, 5), "position_ids": torch.ones(5)}, r"'position_ids' has the shape \(5,\)"),
        ({"input_ids": torch.ones(1, 5), "labels": torch.ones(1, 4)}, r"'input_ids': 5, 'labels': 4"),
        ({"input_ids": torch.ones(1, 5), "attention_mask": torch.ones(1, 1, 5, 7)}, r"'attention_mask': 7"),
        ({"input_ids": torch.ones(1, 5), "attention_mask": torch.ones(1, 1, 2, 5)}, r"\(1, 1, 2, 5\).*5, 5\)"),
        ({"input_ids": torch.ones(1, 5), "cu_seq_lens_q": torch.tensor([0, 9])}, r"ends at \[9\], for 1 row"),
        ({"input_ids": torch.ones(2, 3), "cu_seq_lens_q": torch.tensor([0, 3, 6])}, r"for 2 row\(s\) of 8"),
        ({"input_ids": torch.ones(1, 5), "cu_seq_lens_k": torch.tensor([[0, 5]])}, r"'cu_seq_lens_k' has the shape"),
    ],
)
def test_what_cannot_be_padded_is_refused_with_its_name(micro_batch: dict[str, Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pad_microbatch(micro_batch, 8)
