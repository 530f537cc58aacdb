"""Cutting mini-batches, and putting outputs together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from lightning_pipe.engine import InputError
from lightning_pipe.pipe.scatter import gather, rows_of, scatter


@given(some.integers(1, 20), some.integers(1, 12))
def test_pieces_are_as_even_as_can_be_and_none_is_empty(rows: int, chunks: int) -> None:
    pieces = scatter(torch.arange(rows), chunks)
    sizes = [len(piece) for piece in pieces]
    assert len(pieces) == min(rows, chunks)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert torch.equal(gather(pieces), torch.arange(rows))


def test_every_tensor_in_a_nesting_is_cut_and_anything_else_is_in_every_piece() -> None:
    numbers = torch.arange(4)
    value = {"a": (numbers, [torch.zeros(4, 2)]), "b": "text", "c": None, "d": 2.5}
    first, second = scatter(value, 2)
    assert first["a"][0].tolist() == [0, 1]
    assert second["a"][1][0].shape == (2, 2)
    assert (first["b"], first["c"], first["d"]) == ("text", None, 2.5)
    together = gather([first, second])
    assert torch.equal(together["a"][0], numbers)
    assert together["b"] == "text"


def test_pieces_are_views() -> None:
    whole = torch.zeros(4)
    scatter(whole, 2)[1][0] = 1
    assert whole.tolist() == [0, 0, 1, 0]


def test_rows_are_the_first_dimension_of_all() -> None:
    assert rows_of({"a": torch.zeros(3, 1), "b": [torch.zeros(3), 7]}) == 3
    for value in (torch.tensor(1.0), [torch.zeros(2), torch.zeros(3)], "text", [torch.zeros(2), torch.tensor(1)]):
        with pytest.raises(InputError, match="expected"):
            rows_of(value)


def test_outputs_that_differ_in_more_than_tensors_are_refused() -> None:
    with pytest.raises(InputError, match="different structures"):
        gather([(torch.zeros(1),), [torch.zeros(1)]])
    with pytest.raises(InputError, match="returns 1 for the first micro-batch"):
        gather([(torch.zeros(1), 1), (torch.zeros(1), 2)])
    with pytest.raises(InputError, match="returns 2 for the first micro-batch"):
        gather([(torch.zeros(1), 2), (torch.zeros(1), 1)])
