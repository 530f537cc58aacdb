"""Which of the plans, or schedules, that were measured is taken: one rule, for what trains and for benchmarks.

Plans are measured in turns, round by round: what else the machine does is the same for all plans of a round, more or
less. The best hand-written plan is kept unless a found one is faster beyond noise. Plans that are slower beyond noise
need no further rounds: a race, as O. Maron and A. W. Moore call it (Hoeffding Races, NIPS 1993).

Tested in ``tests/engine/planning/test_planner.py``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar

__all__ = ["best_by_hand", "contenders", "fastest", "most_found", "typical"]

K = TypeVar("K", bound=Hashable)  # what stands for a plan: its name, or what it is made of

# How often at most a plan may be taken to be faster than the hand-written ones when it is not.
_CHANCE = 0.05
# A found plan has to be faster by this part of the time: it may have more batches in flight, which take memory.
_GAIN = 0.005


def typical(seconds: Sequence[float]) -> float:
    """The mean of the middle half; of three, the one in the middle.

    One that was disturbed does not count, as in a median; and the others tell more than the one in the middle.

    Args:
        seconds: at least one.
    """
    cut = max(len(seconds) // 4, int(len(seconds) > 2))
    return statistics.fmean(sorted(seconds)[cut : len(seconds) - cut])


def fastest(measured: Mapping[K, Sequence[float]], hand_written: Collection[K]) -> K:
    """The fastest plan; a hand-written one, unless a found one is faster beyond noise.

    A found plan has to be faster than the hand-written one that is typically the fastest in so many of the rounds that
    plans of equal speed would come to that once in twenty choices at most (a sign test of the paired rounds, its level
    shared among the found ones as Bonferroni has it), and typically faster by half a percent. With few rounds nothing
    passes that test (see :func:`most_found`).

    Args:
        measured: seconds of an iteration in each round, by the plan's name. Plans with fewer rounds than others have
            dropped out: they are not taken.
        hand_written: names of those plans that were not found; at least one has all rounds.
    """
    running, best = _running(measured), best_by_hand(measured, hand_written)
    to_beat = measured[best]
    needed = _wins_needed(len(to_beat), sum(name not in hand_written for name in measured))

    def is_faster(name: K) -> bool:
        gain = typical(measured[name]) < (1 - _GAIN) * typical(to_beat)
        return gain and _wins(measured[name], to_beat) >= needed

    found = [name for name in running if name not in hand_written]
    return min(filter(is_faster, found), key=lambda name: typical(measured[name]), default=best)


def contenders(
    measured: Mapping[K, Sequence[float]], hand_written: Collection[K], hopeless: float = math.inf
) -> list[K]:
    """Those that another round may make :func:`fastest`; none where it would be a waste.

    A hand-written plan drops out if it loses to the hand-written one that is typically the fastest so often that one of
    equal speed would once in twenty cases; a found one also if it so loses to any that is typically the fastest.

    Args:
        measured: as for :func:`fastest`.
        hand_written: as there. The one that found plans are compared with goes on as long as they do.
        hopeless: so many times what the typically fastest hand-written one takes, a plan drops out at once (default
            never): for few rounds, in which nothing loses often enough.
    """
    running = _running(measured)
    rounds = len(measured[running[0]])
    needed = _wins_needed(rounds, 1)
    first = min(running, key=lambda name: typical(measured[name]))
    best = best_by_hand(measured, hand_written)

    def loses(name: K) -> bool:
        # A found plan may be the fastest and yet not be taken: none by hand drops out because of it.
        others = (best,) if name in hand_written else (best, first)
        too_slow = typical(measured[name]) > hopeless * typical(measured[best])
        return too_slow or any(_wins(measured[other], measured[name]) >= needed for other in others)

    left = [name for name in running if name == best or not loses(name)]
    settled = fastest(measured, hand_written)
    return [] if {settled, best}.issuperset(left) else left


def best_by_hand(measured: Mapping[K, Sequence[float]], hand_written: Collection[K]) -> K:
    """The hand-written plan that is typically the fastest, of those that have not dropped out."""
    return min((name for name in _running(measured) if name in hand_written), key=lambda name: typical(measured[name]))


def most_found(rounds: int) -> int:
    """How many found plans can be measured in so many rounds for :func:`fastest` to be able to take one of them.

    None in 4 rounds, 1 in 5, 3 in 6, 6 in 7.
    """
    return int(_CHANCE * 2**rounds)


def _running(measured: Mapping[K, Sequence[float]]) -> list[K]:
    """Those that have not dropped out."""
    rounds = max(map(len, measured.values()))
    return [name for name, times in measured.items() if len(times) == rounds]


def _wins(times: Sequence[float], others: Sequence[float]) -> int:
    return sum(own < other for own, other in zip(times, others, strict=True))


def _wins_needed(rounds: int, found: int) -> int:
    """Least wins that plans of equal speed would reach, any one of them, with less than :data:`_CHANCE`."""
    allowed = _CHANCE / max(1, found) * 2**rounds
    wins, ways = rounds, 1
    while ways <= allowed:
        wins -= 1
        ways += math.comb(rounds, wins)
    return wins + 1
