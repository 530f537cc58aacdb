"""Every user's ratings as one sequence, and which of them are kept back.

Leave one out: a user's last rating is the test part, the one before it the validation part, all earlier ones are for
training. A rating is guessed from those before it, so the test's history holds the validation's rating::

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
# How many of a user's last ratings are not in the history of a part.
HELD_OUT: dict[Part | Literal["train"], int] = {"train": 2, "val": 2, "test": 1}


@dataclass(frozen=True)
class Histories:
    """The ratings by user, and of a user by time; those of user *u* are rows ``starts[u]`` to ``starts[u + 1]``.

    Ratings of the same second are in the order of the file.

    Args:
        item: item numbers from 0, int64 [N].
        stars: 1 to 5, int64 [N].
        seconds: time of the rating, seconds since 1970, int64 [N].
        starts: int64 [users + 1].
        ids: by item number, the item's 64-bit id, int64 [items].
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
        """The user's history in *part*: the last *at_most* rows of it, or all."""
        end = int(self.starts[user + 1]) - HELD_OUT[part]
        start = int(self.starts[user])
        return slice(start if at_most is None else max(start, end - at_most), end)

    def target(self, user: int, part: Part) -> int:
        """The item that comes after the user's history in *part*."""
        return int(self.item[self.starts[user + 1] - HELD_OUT[part]])


def by_user(ratings: Ratings) -> Histories:
    """The histories of all users, who have at least three ratings each (MovieLens: 20)."""
    order = np.argsort(ratings.user, kind="stable")  # they are in order of time already
    counts = np.bincount(ratings.user)
    assert counts.min() >= 3, "one to train on, one to validate, one to test"
    return Histories(
        ratings.item[order],
        ratings.stars[order],
        ratings.seconds[order],
        np.concatenate(([0], np.cumsum(counts))),
        hashed_ids(len(ratings.release_year)),
    )


def hashed_ids(items: int) -> NDArray[np.int64]:
    """An id for each item number as systems at work have them: 64 bits of the hash of a name, anywhere in int64."""
    names = (f"movielens-100k/item/{number}".encode() for number in range(items))
    digests = b"".join(hashlib.blake2b(name, digest_size=8).digest() for name in names)
    return np.frombuffer(digests, dtype="<i8").astype(np.int64)
