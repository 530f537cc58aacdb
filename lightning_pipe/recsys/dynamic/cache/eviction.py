"""Which rows leave a full cache. That costs time and never changes what is trained: a row comes back as it left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.recsys.dynamic.store.row_store import Keys

__all__ = ["Policy", "Score", "checked_policy", "victims"]

Numbers = npt.NDArray[np.int64]
# Of ids, counts and last steps: what each row is worth. The rows that are worth least leave first.
Score = Callable[[Keys, Numbers, Numbers], npt.NDArray[Any]]
Policy = Literal["lru", "lfu"] | Score


def checked_policy(table: str, policy: Policy) -> Policy:
    """*policy*, where it is one.

    Raises:
        SetupError: it is none.
    """
    if policy in ("lru", "lfu") or callable(policy):
        return policy
    raise SetupError(f"table {table!r}: eviction policy {policy!r}, needed is 'lru', 'lfu' or a function of scores")


def victims(
    policy: Policy, number: int, ticks: Numbers, headers: Callable[[], tuple[Keys, Numbers, Numbers]]
) -> npt.NDArray[np.intp]:
    """Indices of the *number* rows that leave first.

    ``lru``: those least recently used; ``lfu``: those in the fewest trained batches, of equals the least recently used;
    a function: those with the lowest scores, likewise.

    Args:
        policy: as above.
        number: at least 1, at most all.
        ticks: of each row, higher where it was used later.
        headers: gives ids, counts and last steps of the rows.

    Raises:
        InputError: a function that returned something else than a number for each row.
    """
    if policy == "lru":
        return _least(ticks, ticks, number)
    keys, counts, last_seen = headers()
    if policy == "lfu":
        return _least(counts, ticks, number)
    scores = np.asarray(policy(keys, counts, last_seen))
    if scores.shape != ticks.shape or scores.dtype.kind not in "iuf" or bool(np.isnan(scores).any()):
        raise InputError(
            f"the eviction policy's function returned {scores.dtype} of shape {scores.shape}, some NaN perhaps, for"
            f" {len(ticks)} rows; needed is one number for each: return a vector"
        )
    return _least(scores, ticks, number)


def _least(scores: npt.NDArray[Any], ties: Numbers, number: int) -> npt.NDArray[np.intp]:
    """Indices of the least scores, of equal ones those with the least ties. In linear time."""
    if number >= len(scores):
        return np.arange(len(scores))
    limit = np.partition(scores, number - 1)[number - 1]
    below, equal = np.flatnonzero(scores < limit), np.flatnonzero(scores == limit)
    rest = number - len(below)
    if rest < len(equal):
        equal = equal[np.argpartition(ties[equal], rest - 1)[:rest]]
    return np.concatenate([below, equal])
