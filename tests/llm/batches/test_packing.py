"""Documents packed into rows: each token once, in few rows, the same after a resumption and with any workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.llm.batches.packing import PackedDocuments, assign_documents_to_rows, split_packed_batch_by_row
from tests.tiers import sampled

LENGTH = 16
LENGTHS = st.lists(st.integers(1, LENGTH), max_size=60)


def documents(lengths: list[int]) -> list[list[int]]:
    """Tokens that occur once each."""
    starts = np.cumsum([1, *lengths]).tolist()
    return [list(range(start, start + size)) for start, size in zip(starts, lengths, strict=False)]


def some(count: int = 60, longest: int = 40) -> list[list[int]]:
    return documents(np.random.default_rng(3).integers(1, longest, count).tolist())


def pieces(batches: list[dict[str, Tensor]]) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of each document of the rows without pads, which are the token 0."""
    found = []
    for batch in batches:
        for ids, labels, positions in zip(
            *(batch[key] for key in ("input_ids", "labels", "position_ids")), strict=True
        ):
            starts = (positions == 0).nonzero().flatten()
            ends = torch.cat([starts[1:], torch.tensor([len(ids)])])
            assert starts[0] == 0
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                assert positions[start:end].tolist() == list(range(end - start))
                size = int((ids[start:end] != 0).sum())
                assert ids[start + size : end].tolist() == [0] * (end - start - size)
                assert labels[start + size : end].tolist() == [-100] * (end - start - size)
                # Pads are at the end of a row only.
                assert end - start == size or end == len(ids)
                if size:
                    found.append((ids[start : start + size].tolist(), labels[start : start + size].tolist()))
    return found


# ---------------------------------------------------------------------- rows


@settings(max_examples=200, deadline=None, database=None)
@given(LENGTHS)
def test_each_document_is_in_one_row_and_best_fit_needs_no_more_rows(lengths: list[int]) -> None:
    sequential, best = (
        assign_documents_to_rows(lengths, LENGTH, "sequential"),
        assign_documents_to_rows(lengths, LENGTH),
    )
    for rows in (sequential, best):
        assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
        assert all(0 < sum(lengths[number] for number in row) <= LENGTH for row in rows)
        assert rows == sorted(map(sorted, rows))
    assert [number for row in sequential for number in row] == list(range(len(lengths)))
    assert len(best) <= len(sequential)


# ---------------------------------------------------------------------- batches


@settings(max_examples=60, deadline=None, database=None)
@given(
    st.lists(st.integers(1, 3 * LENGTH), max_size=30),
    st.sampled_from(["best_fit", "sequential"]),
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(1, 3),
    st.none() | st.integers(0, 3),
)
def test_each_token_is_trained_once_by_one_rank(
    lengths: list[int], method: str, window: int, size: int, ranks: int, seed: int | None
) -> None:
    data = documents(lengths)
    options: dict[str, Any] = {"method": method, "window": window, "seed": seed, "num_replicas": ranks}
    batches = [list(PackedDocuments(data, LENGTH, size, rank=rank, **options)) for rank in range(ranks)]
    assert len({len(of_rank) for of_rank in batches}) == 1
    assert all(one["input_ids"].shape == (size, LENGTH) for of_rank in batches for one in of_rank)
    found = pieces([batch for of_rank in batches for batch in of_rank])
    expected = [
        (one[start : start + LENGTH], [*one[1:], -100][start : start + LENGTH])
        for one in data
        for start in range(0, len(one), LENGTH)
    ]
    assert sorted(found) == sorted(expected)


def test_ids_may_be_arrays_or_tensors_and_labels_may_leave_tokens_out() -> None:
    ids = [[5, 6, 7], [8, 9], [1]]
    expected = list(PackedDocuments(ids, LENGTH, 1))
    for kind in (np.array, lambda one: np.array(one, np.uint16), torch.tensor, lambda one: {"input_ids": one}):
        found = list(PackedDocuments([kind(one) for one in ids], LENGTH, 1))
        assert all(torch.equal(found[0][key], expected[0][key]) for key in expected[0])
    masked = [{"input_ids": one, "labels": [-100, *one[1:]]} for one in ids]
    masked[0]["labels"] = [-100, -100, 7]
    batch = next(iter(PackedDocuments(masked, LENGTH, 1)))
    assert batch["labels"][0].tolist() == [-100, 7, -100, 9] + [-100] * (LENGTH - 4)


def test_each_epoch_has_another_order_and_an_abandoned_one_is_followed_by_a_whole_one() -> None:
    data = PackedDocuments(some(), LENGTH, 2, seed=1)
    first, second = list(data), list(data)
    assert not torch.equal(first[0]["input_ids"], second[0]["input_ids"])
    next(iter(data))
    assert sorted(pieces(list(data))) == sorted(pieces(first))


def test_rows_as_micro_batches_have_the_boundaries_of_their_documents() -> None:
    batch = next(iter(PackedDocuments(documents([5, 9, 12]), LENGTH, 2, method="sequential")))
    first, second = split_packed_batch_by_row(batch)
    assert first["cu_seq_lens_q"].tolist() == first["cu_seq_lens_k"].tolist() == [0, 5, 16]
    assert (first["max_length_q"], second["max_length_k"]) == (11, 16)
    assert second["cu_seq_lens_q"].tolist() == [0, 16]
    assert torch.equal(torch.cat([first["input_ids"], second["input_ids"]]), batch["input_ids"])


# ---------------------------------------------------------------------- resumption


def loader(workers: int, rank: int, ranks: int, **options: Any) -> StatefulDataLoader:
    data = PackedDocuments(some(), LENGTH, 2, window=10, seed=2, rank=rank, num_replicas=ranks, **options)
    return StatefulDataLoader(data, batch_size=None, num_workers=workers, persistent_workers=workers > 0)


def same(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> bool:
    pairs = list(zip(found, expected, strict=True))
    return all(torch.equal(one[key], other[key]) for one, other in pairs for key in other)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", sampled([1, 2, 3], lambda ranks: ranks == 2))
def test_an_epoch_continues_from_each_batch_to_the_bit(ranks: int, workers: int) -> None:
    for rank in range(ranks):
        alone = loader(0, rank, ranks)
        epochs = [list(alone), list(alone)]
        whole, states = loader(workers, rank, ranks), []
        for batch, expected in zip(whole, epochs[0], strict=True):
            assert same([batch], [expected])
            states.append(whole.state_dict())
        assert len(states) >= 5
        # Workers take a second to start: not from each batch, but after batches of each worker.
        for step, state in list(enumerate(states, 1))[:: 1 if workers == 0 else 5]:
            resumed = loader(workers, rank, ranks)
            resumed.load_state_dict(state)
            assert same(list(resumed), epochs[0][step:])
            assert same(list(resumed), epochs[1])


@pytest.mark.parametrize(
    "changes",
    [{"length": LENGTH - 1}, {"window": 2}, {"method": "sequential"}, {"seed": 1}, {"documents": [[1]] * 9}],
    ids=str,
)
def test_a_position_in_other_rows_is_refused(changes: dict[str, Any]) -> None:
    right: dict[str, Any] = {"documents": [[1]] * 8, "length": LENGTH, "batch_size": 1}
    saved = PackedDocuments(**right)
    next(iter(saved))
    (name, value), *_ = changes.items()
    shown = len(value) if name == "documents" else value
    with pytest.raises(SetupError, match=rf"the position was saved for the rows of .* has .*'{name}': {shown!r}"):
        PackedDocuments(**right | changes).load_state_dict(saved.state_dict())
    with pytest.raises(SetupError, match="the position was saved for the rows of"):
        PackedDocuments(**right).load_state_dict({"epoch": 1})


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "document 2 has 0 tokens"),
        (list(range(LENGTH + 1)), f"document 2 has {LENGTH + 1} tokens .* at most length={LENGTH}"),
        ([0.5, 1.0], "document 2 holds torch.float32 of shape"),
        ([True], "document 2 holds torch.bool"),
        (["a", "b"], r"document 2 holds \['a', 'b'\]; expected a list, an array or a 1-d tensor of integers"),
        (torch.ones(1, 2, dtype=torch.long), r"document 2 holds torch.int64 of shape \(1, 2\)"),
        ({"input_ids": [1, 2], "labels": [1]}, "document 2 has 2 tokens and 1 labels"),
        (5, "document 2 is 5; expected ids, or a mapping with input_ids"),
        ({"ids": [1]}, r"document 2 is \{'ids': \[1\]\}"),
        ({"input_ids": [1], "labels": None}, "document 2 is {'input_ids'"),
        ({"input_ids": [1, 0], "attention_mask": [1, 0]}, "document 2 has an attention_mask with zeros"),
    ],
    ids=str,
)
def test_a_wrong_document_is_named_by_its_index(document: Any, message: str) -> None:
    data = PackedDocuments([[1], [2], document, [3]], LENGTH, 1, long_documents="refuse")
    with pytest.raises(InputError, match=message):
        list(data)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length is 0"),
        ({"method": "first_fit"}, "method is 'first_fit'; expected one of 'best_fit', 'sequential'"),
        ({"long_documents": "drop"}, "long_documents is 'drop'"),
        ({"rank": 2, "num_replicas": 2}, "rank is 2 with num_replicas=2; expected a number from 0 to 1"),
    ],
)
def test_a_wrong_argument_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        PackedDocuments(**{"documents": [[1]], "length": LENGTH, "batch_size": 1, **options})
