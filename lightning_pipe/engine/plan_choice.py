"""Which of the plans that were measured is taken: one rule, for what trains and for benchmarks.

Plans are measured in turns, round by round: what else the machine does is the same for all plans of a round, more or
less. The best hand-written plan is kept unless a found one is faster beyond noise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence

__all__ = ["fastest", "most_found"]

# How often at most a plan may be taken to be faster than the hand-written ones when it is not.
_CHANCE = 0.05
# A found plan has to be faster by this part of the time: it may have more batches in flight, which take memory.
_GAIN = 0.005


def fastest(measured: Mapping[str, Sequence[float]], hand_written: Collection[str]) -> str:
    """The fastest plan; a hand-written one, unless a found one is faster beyond noise.

    A found plan has to be faster than the hand-written one with the lowest median in so many of the rounds that plans
    of equal speed would come to that once in twenty choices at most (a sign test of the paired rounds, its level shared
    among the found ones as Bonferroni has it), and its median has to be lower by half a percent. With few rounds
    nothing passes that test (see :func:`most_found`).

    Args:
        measured: seconds of an iteration in each round, by the plan's name; as many rounds of each.
        hand_written: names of those plans that were not found; at least one.
    """
    best = min(hand_written, key=lambda name: statistics.median(measured[name]))
    to_beat = measured[best]
    found = [name for name in measured if name not in hand_written]
    needed = _wins_needed(len(to_beat), len(found))

    def is_faster(name: str) -> bool:
        wins = sum(own < other for own, other in zip(measured[name], to_beat, strict=True))
        return wins >= needed and statistics.median(measured[name]) < (1 - _GAIN) * statistics.median(to_beat)

    return min(filter(is_faster, found), key=lambda name: statistics.median(measured[name]), default=best)


def most_found(rounds: int) -> int:
    """How many found plans can be measured in so many rounds for :func:`fastest` to be able to take one of them.

    None in 4 rounds, 1 in 5, 3 in 6, 6 in 7.
    """
    return int(_CHANCE * 2**rounds)


def _wins_needed(rounds: int, found: int) -> int:
    """Least wins that plans of equal speed would reach, any one of them, with less than :data:`_CHANCE`."""
    allowed = _CHANCE / max(1, found) * 2**rounds
    wins, ways = rounds, 1
    while ways <= allowed:
        wins -= 1
        ways += math.comb(rounds, wins)
    return wins + 1
