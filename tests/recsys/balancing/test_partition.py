"""The partition of samples over ranks, compiled and in Python: the same, and even."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pipe.recsys.balancing.partition import Ranks, Workloads, imbalance, loads_of, partition
from lightning_pipe.recsys.kernels import native

Case = tuple[Workloads, Ranks, int]


@st.composite
def cases(draw: st.DrawFn, even: bool = False) -> Case:
    """Workloads, where samples are, and the number of ranks; rank by rank, or mixed."""
    ranks = draw(st.integers(1, 6))
    each = draw(st.integers(0, 12))
    counts = [each] * ranks if even else draw(st.lists(st.integers(0, 12), min_size=ranks, max_size=ranks))
    whole = st.integers(0, draw(st.sampled_from([1, 3, 1000]))).map(float)
    workload = draw(st.sampled_from([whole, st.floats(0, 1e9)]))
    workloads = draw(st.lists(workload, min_size=sum(counts), max_size=sum(counts)))
    source = np.repeat(np.arange(ranks, dtype=np.int32), counts)
    return np.array(workloads, np.float64), np.array(draw(st.permutations(list(source))), np.int32), ranks


@pytest.fixture(params=["compiled", "in Python"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "in Python":
        monkeypatch.setenv("LIGHTNING_PIPE_NATIVE", "0")
    native.library.cache_clear()
    assert (native.library() is None) == (request.param == "in Python")
    yield
    native.library.cache_clear()


def both_ways(case: Case) -> tuple[Ranks, Ranks]:
    compiled = partition(*case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_pipe.recsys.balancing.partition.library", lambda: None)
        return compiled, partition(*case)


@given(cases())
@settings(deadline=None, max_examples=100)
def test_the_compiled_way_and_the_one_in_python_are_the_same(case: Case) -> None:
    compiled, in_python = both_ways(case)
    np.testing.assert_array_equal(compiled, in_python)


@given(cases())
@settings(deadline=None, max_examples=100)
def test_every_rank_keeps_its_number_of_samples_and_all_work_is_done(case: Case) -> None:
    workloads, source, ranks = case
    found = partition(*case)
    np.testing.assert_array_equal(np.bincount(found, minlength=ranks), np.bincount(source, minlength=ranks))
    assert loads_of(workloads, found, ranks).sum() == pytest.approx(workloads.sum())


@given(cases())
@settings(deadline=None, max_examples=100)
def test_the_slowest_rank_never_has_more_to_do_than_before(case: Case) -> None:
    workloads, source, ranks = case
    found = partition(*case)
    after, before = (loads_of(workloads, of, ranks).max() for of in (found, source))
    assert after < before or (found == source).all()


@given(cases(even=True))
@settings(deadline=None, max_examples=100)
def test_ranks_differ_by_no_more_than_two_neighbours_in_order(case: Case) -> None:
    """The method's bound: what it joins differs by no more than the more uneven of the two; one group of neighbours in
    falling order is the most uneven thing that it begins with."""
    workloads, source, ranks = case
    found = partition(*case)
    if (found == source).all() or ranks == 1:
        return
    groups = np.sort(workloads).reshape(-1, ranks)
    loads = loads_of(workloads, found, ranks)
    assert loads.max() - loads.mean() <= (groups[:, -1] - groups[:, 0]).max() * (1 + 1e-9) + 1e-6


def dealt(workloads: Workloads, ranks: int) -> Ranks:
    """Largest first, one to each rank in turns."""
    turns = np.empty(len(workloads), np.int32)
    turns[np.argsort(-workloads, kind="stable")] = np.arange(len(workloads)) % ranks
    return turns


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("spread", [0.5, 1.0, 1.5])
def test_long_histories_are_spread_evenly(ranks: int, spread: float) -> None:
    random = np.random.default_rng(3)
    for _ in range(5):
        workloads = random.lognormal(4, spread, ranks * 64).round()
        source = np.repeat(np.arange(ranks, dtype=np.int32), 64)
        after = imbalance(loads_of(workloads, partition(workloads, source, ranks), ranks))
        assert after <= imbalance(loads_of(workloads, dealt(workloads, ranks), ranks))
        # Who has the largest has 63 others.
        least = workloads.max() + np.sort(workloads)[:63].sum()
        assert after <= 1.002 * max(1.0, least / (workloads.sum() / ranks))


@pytest.mark.usefixtures("_way")
def test_one_sample_far_above_all_others_is_made_up_for() -> None:
    workloads = np.array([100.0] + [10.0] * 10 + [1.0] * 11)
    source = np.repeat(np.arange(2, dtype=np.int32), 11)
    loads = loads_of(workloads, partition(workloads, source, 2), 2)
    # 11 samples each: the best there is is the largest with all the small ones.
    assert sorted(loads) == [101.0, 110.0]


@pytest.mark.usefixtures("_way")
def test_samples_stay_where_it_makes_no_difference() -> None:
    workloads = np.array([4.0, 4.0, 3.0, 3.0, 9.0, 1.0, 1.0, 3.0])
    source = np.array([0, 0, 0, 0, 1, 1, 1, 1], np.int32)
    found = partition(workloads, source, 2)
    np.testing.assert_array_equal(found, source)  # 14 and 14 already
    swapped = partition(workloads, 1 - source, 2)
    np.testing.assert_array_equal(swapped, 1 - source)


@pytest.mark.usefixtures("_way")
def test_most_of_a_set_stays_with_the_rank_that_has_it() -> None:
    workloads = np.array([10.0, 9.0, 8.0, 7.0, 1.0, 2.0, 3.0, 4.0])
    source = np.array([0, 0, 0, 0, 1, 1, 1, 1], np.int32)
    found = partition(workloads, source, 2)
    assert (found == source).sum() >= 4


@pytest.mark.usefixtures("_way")
def test_a_rank_with_one_sample_gets_the_largest() -> None:
    workloads = np.array([1.0, 2.0, 3.0, 20.0, 5.0, 6.0, 1.0])
    source = np.array([0, 0, 0, 0, 0, 0, 1], np.int32)
    np.testing.assert_array_equal(partition(workloads, source, 2), [0, 0, 0, 1, 0, 0, 0])


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("counts", [[0, 0], [0, 3], [5], [1, 1, 0]])
def test_ranks_without_samples_and_single_ranks_are_fine(counts: list[int]) -> None:
    source = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    found = partition(np.arange(len(source), dtype=np.float64), source, len(counts))
    np.testing.assert_array_equal(np.bincount(found, minlength=len(counts)), counts)


def test_nothing_to_do_is_perfectly_even() -> None:
    assert imbalance(np.zeros(3)) == 1.0
    assert imbalance(np.array([3.0, 1.0])) == 1.5
