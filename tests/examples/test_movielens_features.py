"""What the MovieLens example's model may know of a rating, and how batches carry it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.recsys_movielens import files
from examples.recsys_movielens.data import MovieLensData
from examples.recsys_movielens.features import (
    HISTORY_KEYS,
    SPARSE_KEYS,
    STARS,
    Features,
    describe,
    training_rows,
)
from examples.recsys_movielens.files import Ratings
from tests.examples.conftest import HISTORY, RATINGS


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


def test_the_training_part_is_the_first_80_percent_and_shares_no_second_with_the_test_part(ratings: Ratings) -> None:
    rows = training_rows(ratings.seconds)
    assert rows == pytest.approx(0.8 * RATINGS, abs=20)
    assert ratings.seconds[:rows].max() < ratings.seconds[rows:].min()
    assert training_rows(np.array([1, 2, 3, 4, 5, 5, 5, 5, 5, 6])) == 4


def test_an_epoch_has_every_training_row_at_most_once_and_every_test_row_once(folder: Path) -> None:
    data = MovieLensData(batch_size=64, history_length=HISTORY, data_dir=str(folder))
    data.setup()
    training = list(data.train_dataloader())
    assert [len(batch.labels) for batch in training] == [64] * (training_rows(files.read(folder).seconds) // 64)
    seen = torch.cat([batch.dense_features for batch in data.val_dataloader()])
    expected = describe(files.read(folder), HISTORY)
    np.testing.assert_array_equal(seen.numpy(), expected.dense[expected.training_rows :])
