"""Counts and last uses advance the same with the compiled library and without."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_pipe.recsys.dynamic.cache.row_headers import RowHeaders
from lightning_pipe.recsys.kernels import native


@pytest.mark.parametrize(("ttl", "threshold"), [(None, 1), (None, 3), (2, 1), (4, 3)])
def test_the_compiled_library_changes_nothing(ttl: int | None, threshold: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = RowHeaders(40, ttl, threshold)
    monkeypatch.setenv("LIGHTNING_PIPE_NATIVE", "0")
    native.library.cache_clear()
    plain = RowHeaders(40, ttl, threshold)
    monkeypatch.undo()
    native.library.cache_clear()
    source = np.random.default_rng(0)
    for step in range(1, 60):
        rows = source.permutation(40)[: source.integers(0, 41)]
        one, other = compiled.begin(rows, step), plain.begin(rows, step)
        for name in ("before", "expired", "young"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
        if step % 5 == 0:
            compiled.undo(rows, one)
            plain.undo(rows, other)
        np.testing.assert_array_equal(compiled.read(np.arange(40)), plain.read(np.arange(40)))
        np.testing.assert_array_equal(compiled.dirty, plain.dirty)


def test_a_row_starts_anew_when_nobody_saw_it_for_longer_than_its_time(way: str) -> None:
    headers, row = RowHeaders(1, 3, 1), np.array([0])
    headers.begin(row, 10)
    assert headers.expired(row, 13).tolist() == []
    assert headers.expired(row, 14).tolist() == [0]
    assert headers.begin(row, 13).expired.tolist() == []
    assert headers.read(row).tolist() == [[2, 13]]
    assert headers.begin(row, 17).expired.tolist() == [0]
    assert headers.read(row).tolist() == [[1, 17]]


def test_what_began_last_is_undone_first(way: str) -> None:
    headers, rows = RowHeaders(3, None, 1), np.arange(3)
    headers.begin(rows[:2], 1)
    before = headers.read(rows)
    first = headers.begin(rows[1:], 2)
    second = headers.begin(rows[:2], 3)
    headers.undo(rows[:2], second)
    headers.undo(rows[1:], first)
    np.testing.assert_array_equal(headers.read(rows), before)


def test_a_row_that_a_later_batch_has_seen_stays_as_last_seen_there(way: str) -> None:
    headers, row = RowHeaders(1, None, 1), np.array([0])
    headers.begin(row, 1)
    dropped = headers.begin(row, 2)
    headers.begin(row, 3)
    headers.undo(row, dropped)
    assert headers.read(row).tolist() == [[2, 3]]
