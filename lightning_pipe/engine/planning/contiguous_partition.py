"""Cuts of a list into contiguous shares that minimize the cost of the most expensive share.

Used to assign layers to the stages of a model and to the partitions of a pipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import pairwise


def partition_contiguously(
    items: int,
    shares: int,
    cost: Callable[[int, int, int], float],
    *,
    most_even: bool = False,
    may_be_empty: Collection[int] = (),
) -> list[int]:
    """Number of items in each share."""

    def find_best_partition(limit: float, squares: bool) -> tuple[float, list[int]]:
        """Lowest score of all cuts whose shares cost at most *limit*, and the ends of the shares of the best cut."""
        reached: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # keys are the ends of the last share
        for share in range(shares):
            further: dict[int, tuple[float, list[int]]] = {}
            for first, (score, ends) in reached.items():
                for end in range(first + (share not in may_be_empty), items + 1):
                    if (share_cost := cost(share, first, end)) <= limit:
                        total = score + share_cost * share_cost if squares else max(score, share_cost)
                        best_cut = further.get(end)
                        if best_cut is None or total <= best_cut[0]:
                            # Ties are resolved by comparing the lists.
                            cut = total, [*ends, end] if most_even else [-end, *ends]
                            further[end] = cut if best_cut is None else min(best_cut, cut)
            reached = further
        return reached[items]

    limit, ends = find_best_partition(math.inf, squares=False)
    if most_even:
        _, ends = find_best_partition(limit, squares=True)
    return [end - first for first, end in pairwise(sorted([0, *map(abs, ends)]))]
