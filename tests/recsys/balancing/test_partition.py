"""The partition of samples over ranks: every rank keeps its number of samples, and the work is even."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_pipe.recsys.balancing.partition import (
    Ranks,
    Workloads,
    imbalance,
    partition_samples,
    sum_workloads_by_rank,
)


def dealt(workloads: Workloads, ranks: int) -> Ranks:
    """Largest first, one to each rank in turns."""
    turns = np.empty(len(workloads), np.int32)
    turns[np.argsort(-workloads, kind="stable")] = np.arange(len(workloads)) % ranks
    return turns


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("spread", [0.5, 1.5])
def test_long_histories_are_spread_evenly(ranks: int, spread: float) -> None:
    random = np.random.default_rng(3)
    for _ in range(5):
        workloads = random.lognormal(4, spread, ranks * 64).round()
        source = np.repeat(np.arange(ranks, dtype=np.int32), 64)
        after = imbalance(sum_workloads_by_rank(workloads, partition_samples(workloads, source, ranks), ranks))
        assert after <= imbalance(sum_workloads_by_rank(workloads, dealt(workloads, ranks), ranks))
        # Who has the largest has 63 others.
        least = workloads.max() + np.sort(workloads)[:63].sum()
        assert after <= 1.01 * max(1.0, least / (workloads.sum() / ranks))


def test_one_sample_far_above_all_others_is_made_up_for() -> None:
    workloads = np.array([100.0] + [10.0] * 10 + [1.0] * 11)
    source = np.repeat(np.arange(2, dtype=np.int32), 11)
    loads = sum_workloads_by_rank(workloads, partition_samples(workloads, source, 2), 2)
    # 11 samples each: the best there is is the largest with all the small ones.
    assert sorted(loads) == [101.0, 110.0]


def test_samples_stay_where_it_makes_no_difference() -> None:
    workloads = np.array([4.0, 4.0, 3.0, 3.0, 9.0, 1.0, 1.0, 3.0])
    source = np.array([0, 0, 0, 0, 1, 1, 1, 1], np.int32)
    np.testing.assert_array_equal(partition_samples(workloads, source, 2), source)  # 14 and 14 already


@pytest.mark.parametrize("counts", [[0, 0], [0, 3], [5], [1, 1, 0], [6, 1]])
def test_every_rank_keeps_its_number_of_samples(counts: list[int]) -> None:
    source = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    found = partition_samples(np.arange(len(source), dtype=np.float64), source, len(counts))
    np.testing.assert_array_equal(np.bincount(found, minlength=len(counts)), counts)


def test_nothing_to_do_is_perfectly_even() -> None:
    assert imbalance(np.zeros(3)) == 1.0
    assert imbalance(np.array([3.0, 1.0])) == 1.5
