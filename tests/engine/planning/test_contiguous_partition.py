"""Contiguous shares, compared with every way to cut."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as some

from lightning_pipe.engine.planning.contiguous_partition import partition_contiguously


@given(some.lists(some.integers(0, 9), min_size=1, max_size=6), some.integers(1, 6), some.booleans(), some.data())
def test_no_cut_has_a_cheaper_most_expensive_share_and_of_equals_the_right_one_is_taken(
    costs: list[int], shares: int, most_even: bool, data: some.DataObject
) -> None:
    shares = min(shares, len(costs))
    empty = data.draw(some.sets(some.sampled_from([0, shares - 1])))
    extra = [data.draw(some.integers(0, 9)) for _ in range(shares)]

    def cost(share: int, first: int, end: int) -> float:
        return float(extra[share] + sum(costs[first:end]))

    def all_of(counts: tuple[int, ...]) -> list[float]:
        ends = [0, *itertools.accumulate(counts)]
        return [cost(share, *pair) for share, pair in enumerate(itertools.pairwise(ends))]

    cuts = itertools.combinations_with_replacement(range(len(costs) + 1), shares - 1)
    every = [
        counts
        for ends in cuts
        if (counts := tuple(end - first for first, end in itertools.pairwise([0, *ends, len(costs)])))
        if all(count or share in empty for share, count in enumerate(counts))
    ]
    found = tuple(partition_contiguously(len(costs), shares, cost, most_even=most_even, may_be_empty=empty))
    assert found in every
    least = min(max(all_of(one)) for one in every)
    best = [one for one in every if max(all_of(one)) == least]
    assert found in best
    if most_even:

        def squares(counts: tuple[int, ...]) -> float:
            return sum(one * one for one in all_of(counts))

        assert found == min(best, key=lambda one: (squares(one), one))


def test_of_equally_good_cuts_the_last_share_is_as_small_as_can_be_by_default() -> None:
    assert partition_contiguously(5, 3, lambda _, first, end: float(end - first)) == [2, 2, 1]
    assert partition_contiguously(5, 3, lambda _, first, end: float(end - first), most_even=True) == [1, 2, 2]
