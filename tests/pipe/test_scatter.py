"""Cutting mini-batches, and putting outputs together."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as some

from lightning_pipe.pipe.scatter import concat_micro_batch_outputs, scatter


@given(some.integers(1, 20), some.integers(1, 12))
def test_pieces_are_as_even_as_can_be_and_none_is_empty(rows: int, chunks: int) -> None:
    pieces = scatter(torch.arange(rows), chunks)
    sizes = [len(piece) for piece in pieces]
    assert len(pieces) == min(rows, chunks)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert torch.equal(concat_micro_batch_outputs(pieces), torch.arange(rows))


def test_every_tensor_in_a_nesting_is_cut_and_anything_else_is_in_every_piece() -> None:
    numbers = torch.arange(4)
    value = {"a": (numbers, [torch.zeros(4, 2)]), "b": "text", "c": None, "d": 2.5}
    first, second = scatter(value, 2)
    assert first["a"][0].tolist() == [0, 1]
    assert second["a"][1][0].shape == (2, 2)
    assert (first["b"], first["c"], first["d"]) == ("text", None, 2.5)
    together = concat_micro_batch_outputs([first, second])
    assert torch.equal(together["a"][0], numbers)
    assert together["b"] == "text"
