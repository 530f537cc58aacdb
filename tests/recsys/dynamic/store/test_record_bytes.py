"""Byte strings of keys and records, and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pipe.recsys.dynamic.store.record_bytes import (
    KEY_BYTES,
    decode_keys,
    encode_keys,
    join_bytes_to_records,
    split_records_to_bytes,
)

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(INT64, max_size=50), st.integers(0, 2**16 - 1))
def test_keys_come_back(keys: list[int], table: int) -> None:
    parts = encode_keys(table, np.array(keys, np.int64))
    assert {len(part) for part in parts} <= {KEY_BYTES}
    assert decode_keys(parts).tolist() == keys


@given(st.tuples(st.integers(0, 2**16 - 1), INT64), st.tuples(st.integers(0, 2**16 - 1), INT64))
def test_strings_sort_by_table_and_then_as_numbers_do(one: tuple[int, int], other: tuple[int, int]) -> None:
    (first,), (second,) = (encode_keys(table, np.array([key])) for table, key in (one, other))
    assert (first < second) == (one < other)


@pytest.mark.parametrize(("count", "width"), [(0, 5), (1, 5), (7, 136)])
def test_records_come_back(count: int, width: int) -> None:
    records = np.random.default_rng(0).integers(0, 256, (count, width), dtype=np.uint8)
    np.testing.assert_array_equal(join_bytes_to_records(split_records_to_bytes(records), width), records)


def test_records_of_another_width_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 records have 7 bytes in total, expected 4 bytes each"):
        join_bytes_to_records([b"abcd", b"efg"], 4)
