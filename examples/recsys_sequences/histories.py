"""Each user's ratings as one sequence, with held-out ratings for validation and test.

The split is leave-one-out: a user's last rating is the test part, the previous one the validation part, and all earlier
ones are for training. A rating is predicted from all earlier ones, so the test history holds the validation rating::

    a user's ratings, by time    0  1  2  ...  n-3  n-2  n-1
    training                     ──────────────────
    validation                   ──── history ─────  ?
    test                         ──── history ──────────  ?
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from examples.recsys_movielens.files import Ratings

Part = Literal["val", "test"]
# Number of a user's last ratings that the history of a part excludes.
HELD_OUT: dict[Part | Literal["train"], int] = {"train": 2, "val": 2, "test": 1}


@dataclass(frozen=True)
class Histories:
    """Ratings sorted by user and time. The ratings of user *u* are rows ``starts[u]`` to ``starts[u + 1]``.

    Ratings of the same second are in the order of the file.

    Args:
        item: item number of each rating, from 0, int64 [N].
        stars: stars of each rating, 1 to 5, int64 [N].
        seconds: time of each rating in seconds since 1970, int64 [N].
        starts: first row of each user, and the number of rows, int64 [users + 1].
        ids: 64-bit id of each item, int64 [items].
    """

    item: NDArray[np.int64]
    stars: NDArray[np.int64]
    seconds: NDArray[np.int64]
    starts: NDArray[np.int64]
    ids: NDArray[np.int64]

    @property
    def users(self) -> int:
        return len(self.starts) - 1

    @property
    def items(self) -> int:
        return len(self.ids)

    def rows(self, user: int, part: Part | Literal["train"], at_most: int | None = None) -> slice:
        """Rows of the user's history in *part*: the last *at_most* of them, or all if None."""
        end = int(self.starts[user + 1]) - HELD_OUT[part]
        start = int(self.starts[user])
        return slice(start if at_most is None else max(start, end - at_most), end)

    def target(self, user: int, part: Part) -> int:
        """Item that follows the user's history in *part*."""
        return int(self.item[self.starts[user + 1] - HELD_OUT[part]])


def by_user(ratings: Ratings) -> Histories:
    """Histories of all users. Each user must have at least three ratings (MovieLens: 20)."""
    order = np.argsort(ratings.user, kind="stable")  # the ratings are sorted by time already
    counts = np.bincount(ratings.user)
    assert counts.min() >= 3, "a user needs one rating each for training, validation and test"
    return Histories(
        ratings.item[order],
        ratings.stars[order],
        ratings.seconds[order],
        np.concatenate(([0], np.cumsum(counts))),
        hashed_ids(len(ratings.release_year)),
    )


def hashed_ids(items: int) -> NDArray[np.int64]:
    """An id for each item number as in production systems: 64 bits of a name's hash, over the whole int64 range."""
    names = (f"movielens-100k/item/{number}".encode() for number in range(items))
    digests = b"".join(hashlib.blake2b(name, digest_size=8).digest() for name in names)
    return np.frombuffer(digests, dtype="<i8").astype(np.int64)
