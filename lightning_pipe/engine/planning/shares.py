"""Cuts of a list into contiguous shares that minimise the cost of the most expensive share.

Used to assign layers to the stages of a model and to the partitions of a pipe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import pairwise


def contiguous_shares(
    items: int,
    shares: int,
    cost: Callable[[int, int, int], float],
    *,
    most_even: bool = False,
    may_be_empty: Collection[int] = (),
) -> list[int]:
    """Number of items in each share.

    Args:
        items: number of items, at least as many as shares that may not be empty.
        shares: number of shares.
        cost: function of the index of a share, its first item and the item after its last one that returns the cost of
            the share, which must not be negative.
        most_even: True to choose, among equally good cuts, the most even one (least sum of squared costs), then the
            earliest. With False (default), the latest cut is chosen, compared from the end.
        may_be_empty: indices of shares that may have no items.
    """

    def best(limit: float, squares: bool) -> tuple[float, list[int]]:
        """Lowest score of all cuts whose shares cost at most *limit*, and the ends of the shares of the best cut."""
        reached: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # keys are the ends of the last share
        for share in range(shares):
            further: dict[int, tuple[float, list[int]]] = {}
            for first, (score, ends) in reached.items():
                for end in range(first + (share not in may_be_empty), items + 1):
                    if (here := cost(share, first, end)) <= limit:
                        total = score + here * here if squares else max(score, here)
                        known = further.get(end)
                        if known is None or total <= known[0]:
                            # Ties are resolved by comparing the lists.
                            found = total, [*ends, end] if most_even else [-end, *ends]
                            further[end] = found if known is None else min(known, found)
            reached = further
        return reached[items]

    limit, ends = best(math.inf, squares=False)
    if most_even:
        _, ends = best(limit, squares=True)
    return [end - first for first, end in pairwise(sorted([0, *map(abs, ends)]))]
