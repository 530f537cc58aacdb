"""Features of each rating, computed only from strictly earlier ratings.

The features of a rating, in the training part and in the test part, summarize the ratings of its user, of its item and
of all others from *before the second* in which it was given. Ratings of the same second are left out, because their
order is unknown. Labels of the test part therefore appear in later features, as they would in a production system.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from examples.recsys_movielens.files import Ratings

LIKED_FROM_STARS = 4
TRAINING_SHARE = 0.8
STARS = (1, 2, 3, 4, 5)
AGE_BOUNDS = (18, 25, 30, 35, 40, 45, 50, 56)

# The user's recent items form one feature for each number of stars, so that their embeddings are summed separately.
HISTORY_KEYS = tuple(f"rated_{stars}" for stars in STARS)
# Number of rows of each table, by the feature that names the table.
TABLE_ROWS = {
    "user": 943,
    "item": 1682,
    "age": len(AGE_BOUNDS) + 1,
    "gender": 2,
    "occupation": 21,
    "genres": 19,
}
SPARSE_KEYS = (*TABLE_ROWS, *HISTORY_KEYS)
DENSE_KEYS = (
    "item_liked",
    "item_stars",
    "item_ratings",
    "item_idle",
    "user_liked",
    "user_stars",
    "user_liked_more",
    "user_ratings",
    "user_idle",
    "user_age",
    "genres_liked_more",
    "release_year",
    "years_since_release",
)

# Time after a user's first rating from which the user's own row is used. Most users rate in a single session: 85 % of
# the test part comes from users without a rating in the training part, whose rows were never trained. The model
# therefore learns to predict a first session without the row, and uses the row only for users who return.
SETTLED_SECONDS = 24 * 3600


class Earlier:
    """For every row, the rows of the same group with a strictly smaller time.

    Args:
        group: group number of each row, int64 [N].
        seconds: time of each row, int64 [N].

    After sorting by group and time these rows are adjacent, from the start of the group to the start of the row's
    second::

        group     0  0  0  0  1  1
        seconds   5  7  7  9  7  8
        first     0  0  0  0  4  4
        until     0  1  1  3  4  5
    """

    def __init__(self, group: NDArray[np.int64], seconds: NDArray[np.int64]) -> None:
        self.order = np.lexsort((seconds, group))
        sorted_group, sorted_seconds = group[self.order], seconds[self.order]
        positions = np.arange(len(group))
        new_group = np.diff(sorted_group, prepend=-1) != 0
        new_second = new_group | (np.diff(sorted_seconds, prepend=-1) != 0)
        self.first = self._unsorted(np.maximum.accumulate(np.where(new_group, positions, 0)))
        self.until = self._unsorted(np.maximum.accumulate(np.where(new_second, positions, 0)))

    @property
    def count(self) -> NDArray[np.int64]:
        """Number of earlier rows, int64 [N]."""
        return self.until - self.first

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum of the *values* of the earlier rows, float64 [N]."""
        running = np.concatenate(([0.0], np.cumsum(values[self.order])))
        return running[self.until] - running[self.first]

    def smoothed_mean(
        self, values: NDArray[np.float64], prior: NDArray[np.float64] | float, weight: float = 5.0
    ) -> NDArray[np.float64]:
        """Mean of the *values* of the earlier rows and of *prior*, which counts *weight* times, float64 [N]."""
        return (self.sum(values) + weight * prior) / (self.count + weight)

    def seconds_since_last(self, seconds: NDArray[np.int64]) -> NDArray[np.int64]:
        """Seconds since the latest earlier row, or 0 without one, int64 [N]."""
        last = self.order[np.maximum(self.until - 1, 0)]
        return np.where(self.count > 0, seconds - seconds[last], 0)

    def _unsorted(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        result = np.empty_like(values)
        result[self.order] = values
        return result


@dataclass(frozen=True)
class Features:
    """Model inputs of all ratings. The first ``training_rows`` are the training part.

    Args:
        dense: columns ``DENSE_KEYS``, standardized over the training part, float32 [N, D].
        lengths: number of ids of each of the F = ``len(SPARSE_KEYS)`` features and each rating, ordered by feature and
            then by rating, int64 [F * N].
        ids: concatenated ids, int64 [sum of lengths].
        labels: 1 for ratings of at least ``LIKED_FROM_STARS`` stars, else 0, float32 [N].
        training_rows: number of training rows. All other rows have a later second than any training row.
    """

    dense: NDArray[np.float32]
    lengths: NDArray[np.int64]
    ids: NDArray[np.int64]
    labels: NDArray[np.float32]
    training_rows: int


def training_rows(seconds: NDArray[np.int64]) -> int:
    """Length of the training part of ratings sorted by time: 80 %, less those in the second of the first test one."""
    return int(np.searchsorted(seconds, seconds[int(TRAINING_SHARE * len(seconds))], side="left"))


def describe(ratings: Ratings, history_length: int) -> Features:
    """Convert ratings to features.

    Args:
        ratings: ratings sorted by time.
        history_length: number of the user's most recent items to include.
    """
    liked = (ratings.stars >= LIKED_FROM_STARS).astype(np.float64)
    training = training_rows(ratings.seconds)
    by_user = Earlier(ratings.user, ratings.seconds)
    dense = _dense(ratings, liked, by_user)
    mean, deviation = dense[:training].mean(axis=0), dense[:training].std(axis=0)
    columns = [
        _user(ratings, by_user),
        *_single_ids(ratings),
        _genres(ratings),
        *_history(ratings, by_user, history_length),
    ]
    return Features(
        dense=((dense - mean) / np.maximum(deviation, 1e-6)).astype(np.float32),
        lengths=np.concatenate([lengths for lengths, _ in columns]),
        ids=np.concatenate([ids for _, ids in columns]),
        labels=liked.astype(np.float32),
        training_rows=training,
    )


def _dense(ratings: Ratings, liked: NDArray[np.float64], by_user: Earlier) -> NDArray[np.float64]:
    stars, seconds = ratings.stars.astype(np.float64), ratings.seconds
    by_item = Earlier(ratings.item, seconds)
    all_liked = Earlier(np.zeros_like(seconds), seconds).smoothed_mean(liked, 0.5)
    item_liked = by_item.smoothed_mean(liked, all_liked)
    # The user's preference relative to other users. The user's mean alone would also reflect the quality of the items.
    more_liked = liked - item_liked
    years = np.where(ratings.release_year > 0, ratings.release_year, np.median(ratings.release_year))[ratings.item]
    columns = {
        "item_liked": _log_odds(item_liked),
        "item_stars": by_item.smoothed_mean(stars, 3.5),
        "item_ratings": np.log1p(by_item.count),
        "item_idle": np.log1p(by_item.seconds_since_last(seconds)),
        "user_liked": _log_odds(by_user.smoothed_mean(liked, all_liked)),
        "user_stars": by_user.smoothed_mean(stars, 3.5),
        "user_liked_more": by_user.smoothed_mean(more_liked, 0.0),
        "user_ratings": np.log1p(by_user.count),
        "user_idle": np.log1p(by_user.seconds_since_last(seconds)),
        "user_age": ratings.age[ratings.user],
        "genres_liked_more": _genre_taste(ratings, more_liked),
        "release_year": years,
        "years_since_release": 1970 + seconds / (365.25 * 24 * 3600) - years,
    }
    return np.stack([columns[key] for key in DENSE_KEYS], axis=1)


def _log_odds(share: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.log(share / (1 - share))


def _genre_taste(ratings: Ratings, more_liked: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over the item's genres of the user's preference for earlier items of the genre, relative to others, [N]."""
    row, genre = np.nonzero(ratings.genres[ratings.item])
    of_genre = Earlier(ratings.user[row] * ratings.genres.shape[1] + genre, ratings.seconds[row])
    taste = of_genre.smoothed_mean(more_liked[row], 0.0)
    rows = len(ratings.user)
    return np.bincount(row, taste, rows) / np.maximum(np.bincount(row, minlength=rows), 1)


_Column = tuple[NDArray[np.int64], NDArray[np.int64]]


def _user(ratings: Ratings, by_user: Earlier) -> _Column:
    settled = ratings.seconds - ratings.seconds[by_user.order[by_user.first]] > SETTLED_SECONDS
    return settled.astype(np.int64), ratings.user[settled]


def _single_ids(ratings: Ratings) -> list[_Column]:
    """Columns of the item and the user's demographics, with one id each."""
    ones, user = np.ones_like(ratings.user), ratings.user
    age = np.searchsorted(AGE_BOUNDS, ratings.age[user], side="right")
    return [(ones, ids) for ids in (ratings.item, age, ratings.gender[user], ratings.occupation[user])]


def _genres(ratings: Ratings) -> _Column:
    of_item = ratings.genres[ratings.item]
    return of_item.sum(axis=1), np.nonzero(of_item)[1]


def _history(ratings: Ratings, by_user: Earlier, history_length: int) -> list[_Column]:
    """Columns of the user's last *history_length* strictly earlier items, one for each number of stars."""
    begin = np.maximum(by_user.first, by_user.until - history_length)
    lengths = by_user.until - begin
    row = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + begin[row]
    earlier = by_user.order[position]
    columns = []
    for stars in STARS:
        chosen = ratings.stars[earlier] == stars
        columns.append((np.bincount(row[chosen], minlength=len(lengths)), ratings.item[earlier[chosen]]))
    return columns
