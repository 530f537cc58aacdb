"""Eviction policies of a full cache. The policy affects speed only: an evicted row is restored unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.recsys.dynamic.store.row_store import Keys

Numbers = npt.NDArray[np.int64]
# Function (ids, counts, last steps) -> score of each row. Rows with the lowest scores are evicted first.
Score = Callable[[Keys, Numbers, Numbers], npt.NDArray[Any]]
Policy = Literal["lru", "lfu"] | Score


def select_victims(
    policy: Policy, number: int, ticks: Numbers, headers: Callable[[], tuple[Keys, Numbers, Numbers]]
) -> npt.NDArray[np.intp]:
    """Indices of the *number* rows that are evicted first.

    ``lru`` evicts the least recently used rows, ``lfu`` the rows that occurred in the fewest trained batches, and a
    function the rows with the lowest scores. Ties are broken by least recent use.
    """
    if policy == "lru":
        return _select_lowest_scores(ticks, ticks, number)
    keys, counts, last_seen = headers()
    if policy == "lfu":
        return _select_lowest_scores(counts, ticks, number)
    scores = np.asarray(policy(keys, counts, last_seen))
    if scores.shape != ticks.shape or scores.dtype.kind not in "iuf" or bool(np.isnan(scores).any()):
        raise InputError(
            f"the eviction policy's function returned {scores.dtype} of shape {scores.shape}, possibly with NaN, for"
            f" {len(ticks)} rows; expected one number for each. Return a vector of scores without NaN"
        )
    return _select_lowest_scores(scores, ticks, number)


def _select_lowest_scores(scores: npt.NDArray[Any], ties: Numbers, number: int) -> npt.NDArray[np.intp]:
    """Indices of the *number* lowest scores, equal scores in order of *ties*. Linear time."""
    if number >= len(scores):
        return np.arange(len(scores))
    limit = np.partition(scores, number - 1)[number - 1]
    below, equal = np.flatnonzero(scores < limit), np.flatnonzero(scores == limit)
    remaining = number - len(below)
    if remaining < len(equal):
        equal = equal[np.argpartition(ties[equal], remaining - 1)[:remaining]]
    return np.concatenate([below, equal])
