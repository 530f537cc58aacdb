"""What the MovieLens example's model may know of a rating, and how batches carry it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.recsys_movielens import files
from examples.recsys_movielens.baseline import item_mean
from examples.recsys_movielens.data import MovieLensData, RatingDataset
from examples.recsys_movielens.features import (
    HISTORY_KEYS,
    SETTLED_SECONDS,
    SPARSE_KEYS,
    STARS,
    TABLE_ROWS,
    Earlier,
    Features,
    describe,
    training_rows,
)
from examples.recsys_movielens.files import Ratings
from tests.examples.conftest import HISTORY, RATINGS, USERS


def ids_of(features: Features, key: str, row: int) -> list[int]:
    bag = SPARSE_KEYS.index(key) * len(features.labels) + row
    start = int(features.lengths[:bag].sum())
    return features.ids[start : start + features.lengths[bag]].tolist()


def test_the_history_is_the_users_last_ratings_of_strictly_earlier_seconds(
    ratings: Ratings, features: Features
) -> None:
    ties = 0
    for row in range(RATINGS):
        of_user = np.flatnonzero(ratings.user == ratings.user[row])
        earlier = of_user[ratings.seconds[of_user] < ratings.seconds[row]][-HISTORY:]
        ties += int((ratings.seconds[of_user] == ratings.seconds[row]).sum() > 1)
        for key, stars in zip(HISTORY_KEYS, STARS, strict=True):
            expected = ratings.item[earlier[ratings.stars[earlier] == stars]].tolist()
            assert ids_of(features, key, row) == expected
    assert ties > 100, "the invented data has too few ties to show that they are left out"


def test_a_rating_is_described_without_its_own_stars_those_of_its_second_and_later_ones(ratings: Ratings) -> None:
    before = describe(ratings, HISTORY)
    for row in range(before.training_rows, RATINGS, 10):
        changed = np.where(ratings.seconds >= ratings.seconds[row], 6 - ratings.stars, ratings.stars)
        after = describe(dataclasses.replace(ratings, stars=changed), HISTORY)
        assert not np.array_equal(before.labels, after.labels)
        known = np.flatnonzero(ratings.seconds <= ratings.seconds[row])
        np.testing.assert_array_equal(before.dense[known], after.dense[known])
        for key in SPARSE_KEYS:
            assert ids_of(before, key, row) == ids_of(after, key, row)


def test_labels_of_the_test_part_are_known_once_they_are_past(ratings: Ratings, features: Features) -> None:
    last = RATINGS - 1
    past = (ratings.user == ratings.user[last]) & (ratings.seconds < ratings.seconds[last])
    assert past[features.training_rows :].any()
    changed = np.where(past & (np.arange(RATINGS) >= features.training_rows), 6 - ratings.stars, ratings.stars)
    after = describe(dataclasses.replace(ratings, stars=changed), HISTORY)
    assert not np.array_equal(features.dense[last], after.dense[last])
    assert [ids_of(features, key, last) for key in HISTORY_KEYS] != [ids_of(after, key, last) for key in HISTORY_KEYS]


def test_sums_counts_and_pauses_take_in_strictly_earlier_rows_of_the_group_alone() -> None:
    draw = np.random.default_rng(1)
    group, seconds, values = draw.integers(0, 5, 200), draw.integers(0, 30, 200), draw.random(200)
    earlier = Earlier(group, seconds)
    pauses = earlier.seconds_since_last(seconds)
    for row in range(200):
        expected = np.flatnonzero((group == group[row]) & (seconds < seconds[row]))
        assert earlier.count[row] == len(expected)
        assert earlier.sum(values)[row] == pytest.approx(values[expected].sum())
        assert pauses[row] == (seconds[row] - seconds[expected].max() if len(expected) else 0)


def test_the_training_part_is_the_first_80_percent_and_shares_no_second_with_the_test_part(ratings: Ratings) -> None:
    rows = training_rows(ratings.seconds)
    assert rows == pytest.approx(0.8 * RATINGS, abs=20)
    assert ratings.seconds[:rows].max() < ratings.seconds[rows:].min()
    assert training_rows(np.array([1, 2, 3, 4, 5, 5, 5, 5, 5, 6])) == 4


def test_a_user_has_a_row_of_their_own_only_when_they_come_back(ratings: Ratings, features: Features) -> None:
    first = np.array([ratings.seconds[ratings.user == user].min() for user in range(USERS)])
    settled = ratings.seconds - first[ratings.user] > SETTLED_SECONDS
    assert 0 < settled.sum() < RATINGS
    for row in range(0, RATINGS, 7):
        assert ids_of(features, "user", row) == ([ratings.user[row]] if settled[row] else [])


def test_ids_are_inside_their_tables_and_labels_are_ratings_from_four_stars(
    ratings: Ratings, features: Features
) -> None:
    bounds = np.repeat([TABLE_ROWS.get(key, TABLE_ROWS["item"]) for key in SPARSE_KEYS], RATINGS)
    assert len(features.lengths) == len(bounds)
    assert features.lengths.sum() == len(features.ids)
    assert (features.ids < np.repeat(bounds, features.lengths)).all()
    assert features.ids.min() >= 0
    np.testing.assert_array_equal(features.labels, ratings.stars >= 4)
    assert np.isfinite(features.dense).all()
    np.testing.assert_allclose(features.dense[: features.training_rows].mean(axis=0), 0, atol=1e-4)


def test_genres_are_all_those_of_the_item_and_a_year_that_is_a_word_counts_as_unknown(
    ratings: Ratings, features: Features
) -> None:
    for row in range(0, RATINGS, 13):
        assert ids_of(features, "genres", row) == list(range(1 + (ratings.item[row] + 1) % 3))
    assert ratings.release_year[[2, 3]].tolist() == [0, 1934]


def test_the_baseline_knows_the_training_part_alone(ratings: Ratings, features: Features) -> None:
    score = item_mean(ratings, features)
    rows = features.training_rows
    guesses = []
    for row in range(rows, RATINGS):
        likes = features.labels[:rows][ratings.item[:rows] == ratings.item[row]]
        guesses.append((likes.sum() + 5 * features.labels[:rows].mean()) / (len(likes) + 5))
    shares, labels = np.array(guesses), features.labels[rows:]
    assert score.log_loss == pytest.approx(-np.log(np.where(labels == 1, shares, 1 - shares)).mean(), rel=1e-5)
    pairs = shares[labels == 1][:, None] - shares[labels == 0][None, :]
    assert score.auroc == pytest.approx(((pairs > 0) + (pairs == 0) / 2).mean(), rel=1e-5)


def test_a_batch_holds_each_of_its_rows_bags_key_by_key(features: Features) -> None:
    rows = range(features.training_rows, RATINGS)
    indices = [5, 0, 17, 5, len(rows) - 1]
    batch = RatingDataset(features, rows).__getitems__(indices)
    sparse = batch.sparse_features
    assert sparse.keys() == list(SPARSE_KEYS)
    assert sparse.stride() == len(indices)
    for key in SPARSE_KEYS:
        bags = [bag.tolist() for bag in sparse[key].to_dense()]
        assert bags == [ids_of(features, key, rows.start + index) for index in indices]
    there = [rows.start + index for index in indices]
    np.testing.assert_array_equal(batch.dense_features.numpy(), features.dense[there])
    np.testing.assert_array_equal(batch.labels.numpy(), features.labels[there])


def test_an_epoch_has_every_training_row_at_most_once_and_every_test_row_once(folder: Path) -> None:
    data = MovieLensData(batch_size=64, history_length=HISTORY, data_dir=str(folder))
    data.setup()
    training = list(data.train_dataloader())
    assert [len(batch.labels) for batch in training] == [64] * (training_rows(files.read(folder).seconds) // 64)
    seen = torch.cat([batch.dense_features for batch in data.val_dataloader()])
    expected = describe(files.read(folder), HISTORY)
    np.testing.assert_array_equal(seen.numpy(), expected.dense[expected.training_rows :])
