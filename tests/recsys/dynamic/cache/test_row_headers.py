"""Counts and last uses of rows, when batches begin and are undone."""

from __future__ import annotations

import numpy as np

from lightning_pipe.recsys.dynamic.cache.row_headers import RowHeaders


def test_a_row_starts_anew_when_nobody_saw_it_for_longer_than_its_time() -> None:
    headers, row = RowHeaders(1, 3, 1), np.array([0])
    headers.begin_batch_and_count_ids(row, 10)
    assert headers.select_expired(row, 13).tolist() == []
    assert headers.select_expired(row, 14).tolist() == [0]
    assert headers.begin_batch_and_count_ids(row, 13).expired.tolist() == []
    assert headers.values[row].tolist() == [[2, 13]]
    assert headers.begin_batch_and_count_ids(row, 17).expired.tolist() == [0]
    assert headers.values[row].tolist() == [[1, 17]]


def test_what_began_last_is_undone_first() -> None:
    headers, rows = RowHeaders(3, None, 1), np.arange(3)
    headers.begin_batch_and_count_ids(rows[:2], 1)
    before = headers.values[rows]
    first = headers.begin_batch_and_count_ids(rows[1:], 2)
    second = headers.begin_batch_and_count_ids(rows[:2], 3)
    headers.undo(rows[:2], second)
    headers.undo(rows[1:], first)
    np.testing.assert_array_equal(headers.values[rows], before)


def test_a_row_that_a_later_batch_has_seen_stays_as_last_seen_there() -> None:
    headers, row = RowHeaders(1, None, 1), np.array([0])
    headers.begin_batch_and_count_ids(row, 1)
    dropped = headers.begin_batch_and_count_ids(row, 2)
    headers.begin_batch_and_count_ids(row, 3)
    headers.undo(row, dropped)
    assert headers.values[row].tolist() == [[2, 3]]
