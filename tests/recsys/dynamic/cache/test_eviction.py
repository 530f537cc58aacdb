"""The rows that leave are those that the policy names."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.recsys.dynamic.cache.eviction import Policy, select_victims

ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(-3, 3)), min_size=1, max_size=40)


def _score(
    keys: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], last_seen: npt.NDArray[np.int64]
) -> npt.NDArray[np.floating]:
    return keys * 0.5 + counts - last_seen


def _chosen(policy: Policy, rows: list[tuple[int, int, int]], number: int) -> list[int]:
    counts, ticks, keys = np.array(rows, np.int64).T
    return select_victims(policy, number, ticks, lambda: (keys, counts, keys * 2)).tolist()


@given(ROWS, st.data())
def test_those_leave_that_a_full_sort_puts_first(rows: list[tuple[int, int, int]], data: st.DataObject) -> None:
    number = data.draw(st.integers(1, len(rows)))
    orders = {
        "lru": lambda row: (row[1],),
        "lfu": lambda row: (row[0], row[1]),
        _score: lambda row: (row[2] * 0.5 + row[0] - row[2] * 2, row[1]),
    }
    for policy, order in orders.items():
        chosen = _chosen(policy, rows, number)  # type: ignore[arg-type]
        assert len(set(chosen)) == number
        assert sorted(order(rows[at]) for at in chosen) == sorted(map(order, rows))[:number]


@pytest.mark.parametrize(
    "scores",
    [np.zeros(2), np.array([1.0, np.nan, 0.0]), np.array(["a", "b", "c"]), 1.0],
    ids=["few", "nan", "text", "one"],
)
def test_scores_that_are_none_are_refused(scores: npt.NDArray[np.float64]) -> None:
    with pytest.raises(InputError, match="for 3 rows; expected one number for each"):
        _chosen(lambda keys, counts, last_seen: scores, [(1, 1, 1)] * 3, 1)
