"""Sequences are cut over ranks; who attends to whom in the whole of them is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.batches.padding import PadValues
from lightning_pipe.llm.parallel.sequence_chunks import AttentionPattern, shard_micro_batch
from tests.llm.document_masks import block_diagonal_mask


def tokens_of(rows: int, length: int) -> dict[str, Any]:
    ids = torch.arange(rows * length).view(rows, length)
    return {"input_ids": ids, "labels": ids + 1}


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def own_block(attention: AttentionPattern, rank: int, part: int) -> Tensor:
    """What a rank's tokens may attend to among themselves."""
    mask = attention.as_mask()
    assert mask is not None
    chunk = slice(rank * part, (rank + 1) * part)
    return mask[..., chunk, chunk]


@settings(max_examples=40, deadline=None, database=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_the_chunks_of_all_ranks_in_their_order_are_the_sequences(rows: int, part: int, size: int) -> None:
    length = part * size
    micro_batch = tokens_of(rows, length) | {
        "position_ids": torch.arange(length)[None] + 3,
        "inputs_embeds": torch.randn(rows, length, 2),
        "attention_mask": torch.ones(rows, length),
        "scale": torch.ones(length, length),
        "name": "a",
    }
    keys = PadValues(extra_pad_values={"inputs_embeds": 0.0})
    cut = [shard_micro_batch(micro_batch, rank, size, keys)[0] for rank in range(size)]
    for key in ("input_ids", "labels", "position_ids", "inputs_embeds", "attention_mask"):
        assert torch.equal(torch.cat([one[key] for one in cut], 1), micro_batch[key])
        assert all(one[key].shape[1] == part and one[key].is_contiguous() for one in cut)
    assert all(one["scale"] is micro_batch["scale"] and one["name"] == "a" for one in cut)


def test_a_balanced_chunk_is_a_piece_from_the_beginning_and_one_from_the_end() -> None:
    ends = torch.tensor([0, 3, 7, 8])
    square = torch.arange(64.0).view(1, 1, 8, 8)
    micro_batch = tokens_of(1, 8) | {"attention_mask": square}
    local, attention = shard_micro_batch(micro_batch, 1, 2, balanced=True)
    own = [2, 3, 4, 5]
    assert local["input_ids"].tolist() == local["position_ids"].tolist() == [own]
    assert torch.equal(local["attention_mask"], square[:, :, own][..., own])
    assert attention.as_mask() is square
    local, _ = shard_micro_batch(tokens_of(1, 8) | {"cu_seq_lens_q": ends}, 0, 2, balanced=True)
    # Tokens 0, 1, 6 and 7: of the first document, of the second and of the third.
    assert local["cu_seq_lens_q"].tolist() == [0, 2, 3, 4]


def test_positions_that_are_missing_are_counted_from_the_beginning_of_the_whole_sequence() -> None:
    local, _ = shard_micro_batch(tokens_of(2, 6), 1, 3)
    assert local["position_ids"].tolist() == [[2, 3], [2, 3]]


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"attention_mask": torch.ones(2, 4, dtype=torch.long)},
        {"position_ids": torch.tensor([[0, 1, 2, 3], [5, 6, 7, 8]])},
    ],
    ids=["nothing", "no padding", "one document a row"],
)
def test_what_is_merely_causal_has_no_mask(said: dict[str, Tensor]) -> None:
    _, attention = shard_micro_batch(tokens_of(2, 4) | said, 0, 2)
    assert attention.as_mask() is None


def test_the_documents_of_a_packed_row_are_kept_apart_wherever_they_are_cut() -> None:
    ends = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    micro_batch = tokens_of(1, 8) | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 4}
    parts = {0: ([0, 3, 4], 3), 1: ([0, 4], 4)}
    for rank, (local_ends, longest) in parts.items():
        local, attention = shard_micro_batch(micro_batch, rank, 2)
        mask = attention.as_mask()
        assert mask is not None
        assert torch.equal(mask, block_diagonal_mask(ends, 8))
        assert local["cu_seq_lens_q"].tolist() == local["cu_seq_lens_k"].tolist() == local_ends
        assert local["cu_seq_lens_q"].dtype == torch.int32
        assert local["max_length_q"] == longest
        # A model that makes its mask from its chunk's documents makes that part of it.
        assert torch.equal(block_diagonal_mask(local["cu_seq_lens_q"], 4), own_block(attention, rank, 4))


def test_positions_that_begin_anew_begin_a_document_in_their_own_row() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    _, attention = shard_micro_batch(tokens_of(2, 6) | {"position_ids": positions}, 0, 2)
    mask = attention.as_mask()
    assert mask is not None
    assert torch.equal(mask[:1], block_diagonal_mask(torch.tensor([0, 3, 5, 6]), 6))
    assert torch.equal(mask[1, 0], causal(6))


def test_none_attends_to_padding_and_positions_beside_a_mask_are_not_documents() -> None:
    real = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0], [0, 0, 1, 2]])
    _, attention = shard_micro_batch(tokens_of(2, 4) | {"attention_mask": real, "position_ids": positions}, 1, 2)
    mask = attention.as_mask()
    assert mask is not None
    assert torch.equal(mask, (causal(4) & (real[:, None] == 1))[:, None])


def test_a_square_mask_counts_as_it_is_and_its_chunk_is_cut_on_both_dimensions() -> None:
    square = torch.randn(2, 3, 6, 6)
    local, attention = shard_micro_batch(tokens_of(2, 6) | {"attention_mask": square}, 1, 3)
    assert attention.as_mask() is square
    assert torch.equal(local["attention_mask"], square[..., 2:4, 2:4])
    assert local["input_ids"].shape == local["position_ids"].shape == (2, 2)


@pytest.mark.parametrize(
    ("micro_batch", "size", "message"),
    [
        ({"name": "a"}, 2, "lengths {}; expected one length"),
        (tokens_of(1, 4) | {"labels": torch.ones(1, 6)}, 2, "'input_ids': 4, 'labels': 6"),
        (tokens_of(2, 4) | {"attention_mask": torch.ones(2, 4, 4)}, 2, r"shape \(2, 4, 4\)"),
        (tokens_of(2, 4) | {"attention_mask": torch.ones(2, 1, 2, 4)}, 2, r"shape \(2, 1, 2, 4\)"),
        (
            tokens_of(1, 4) | {"attention_mask": torch.ones(1, 4), "cu_seq_lens_q": torch.tensor([0, 2, 4])},
            2,
            "Leave the mask out",
        ),
        (
            tokens_of(1, 4) | {"cu_seq_lens_q": torch.tensor([0, 2, 4]), "cu_seq_lens_k": torch.tensor([0, 1, 4])},
            2,
            r"\[0, 2, 4\] and its cu_seq_lens_k \[0, 1, 4\]",
        ),
    ],
    ids=["no sequence", "lengths", "three dimensions", "not square", "mask and documents", "documents"],
)
def test_what_cannot_be_cut_is_refused(micro_batch: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        shard_micro_batch(micro_batch, 0, size)
