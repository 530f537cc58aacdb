"""The bijection that spreads ids over ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_pipe.recsys.dynamic.tables.id_mixing import mix_ids, unmix_ids

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(INT64, max_size=50))
def test_what_is_mixed_comes_back(ids: list[int]) -> None:
    tensor = torch.tensor(ids, dtype=torch.int64)
    assert unmix_ids(mix_ids(tensor)).tolist() == ids
    assert mix_ids(unmix_ids(tensor)).tolist() == ids
    assert tensor.tolist() == ids


def test_it_is_the_finalizer_of_splitmix64() -> None:
    # The first numbers of SplitMix64 from the seed 1234567, as its authors' program prints them.
    increment = 0x9E3779B97F4A7C15
    states = [(1234567 + (number + 1) * increment) % 2**64 for number in range(3)]
    signed = torch.tensor([state - 2**64 if state >= 2**63 else state for state in states])
    found = [value % 2**64 for value in mix_ids(signed).tolist()]
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("step", [1, 2, 8, 1000, 1 << 40])
def test_regular_ids_are_spread_evenly(step: int) -> None:
    ids = torch.arange(4096) * step
    for ranks in (2, 3, 8):
        counts = torch.bincount(mix_ids(ids).remainder(ranks), minlength=ranks)
        assert counts.max() < 1.2 * 4096 / ranks
