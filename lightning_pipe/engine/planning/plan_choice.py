"""Choice among measured plans or schedules. Training and benchmarks use the same rule.

Each round measures all plans in turn, so that other load on the machine affects them about equally. The best
hand-written plan is chosen unless a found plan is faster beyond noise. Plans that are slower beyond noise drop out
before the last round, as in Hoeffding races (O. Maron and A. W. Moore, NIPS 1993).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar

K = TypeVar("K", bound=Hashable)  # key of a plan, such as its name

# Highest probability of choosing a found plan that is not faster than the hand-written ones.
_CHANCE = 0.05
# Smallest relative gain for which a found plan is chosen, since it may keep more batches in flight and so in memory.
_GAIN = 0.005


def interquartile_mean(seconds: Sequence[float]) -> float:
    """Mean of the middle half of the values; the median of three values.

    Like a median, it ignores outliers. It has less variance than a median, because it uses more values.
    """
    cut = max(len(seconds) // 4, int(len(seconds) > 2))
    return statistics.fmean(sorted(seconds)[cut : len(seconds) - cut])


def choose_measured_plan(measured: Mapping[K, Sequence[float]], hand_written: Collection[K]) -> K:
    """The best hand-written plan, or the fastest found plan if it is faster beyond noise.

    The best hand-written plan has the lowest typical time (see :func:`interquartile_mean`). A found plan must meet two
    conditions. Its typical time is lower by at least half a percent. It also wins enough rounds against the best
    hand-written plan to pass a sign test of the paired rounds. The level of the test is 5 %, divided among the found
    plans (Bonferroni correction). With few rounds no plan can pass it (see :func:`max_generated_plans`).
    """
    running, best = _list_surviving_plans(measured), find_best_hand_written_plan(measured, hand_written)
    to_beat = measured[best]
    needed = _compute_min_significant_wins(len(to_beat), sum(name not in hand_written for name in measured))

    def is_faster(name: K) -> bool:
        gain = interquartile_mean(measured[name]) < (1 - _GAIN) * interquartile_mean(to_beat)
        return gain and _count_wins(measured[name], to_beat) >= needed

    generated = [name for name in running if name not in hand_written]
    return min(filter(is_faster, generated), key=lambda name: interquartile_mean(measured[name]), default=best)


def select_survivors(
    measured: Mapping[K, Sequence[float]], hand_written: Collection[K], drop_above: float = math.inf
) -> list[K]:
    """Plans to measure in another round. Empty if only the best hand-written plan and the current choice remain.

    A hand-written plan drops out if it loses a sign test at the 5 % level against the best hand-written plan. A found
    plan also drops out if it loses this test against the plan with the lowest typical time.
    """
    running = _list_surviving_plans(measured)
    rounds = len(measured[running[0]])
    needed = _compute_min_significant_wins(rounds, 1)
    first = min(running, key=lambda name: interquartile_mean(measured[name]))
    best = find_best_hand_written_plan(measured, hand_written)

    def is_eliminated(name: K) -> bool:
        # The fastest found plan may still not be chosen, so hand-written plans do not drop out because of it.
        rivals = (best,) if name in hand_written else (best, first)
        too_slow = interquartile_mean(measured[name]) > drop_above * interquartile_mean(measured[best])
        return too_slow or any(_count_wins(measured[rival], measured[name]) >= needed for rival in rivals)

    left = [name for name in running if name == best or not is_eliminated(name)]
    choice = choose_measured_plan(measured, hand_written)
    return [] if {choice, best}.issuperset(left) else left


def find_best_hand_written_plan(measured: Mapping[K, Sequence[float]], hand_written: Collection[K]) -> K:
    """Hand-written plan with the lowest typical time, among those that have not dropped out."""
    return min(
        (name for name in _list_surviving_plans(measured) if name in hand_written),
        key=lambda name: interquartile_mean(measured[name]),
    )


def max_generated_plans(rounds: int) -> int:
    """Maximum number of found plans for which :func:`choose_measured_plan` can still choose one after *rounds* rounds.

    For example 0 in 4 rounds, 1 in 5, 3 in 6, and 6 in 7.
    """
    return int(_CHANCE * 2**rounds)


def _list_surviving_plans(measured: Mapping[K, Sequence[float]]) -> list[K]:
    """Plans that have not dropped out."""
    rounds = max(map(len, measured.values()))
    return [name for name, times in measured.items() if len(times) == rounds]


def _count_wins(times: Sequence[float], rival_times: Sequence[float]) -> int:
    return sum(seconds < rival_seconds for seconds, rival_seconds in zip(times, rival_times, strict=True))


def _compute_min_significant_wins(rounds: int, generated: int) -> int:
    """Fewest wins that pass a sign test at the level :data:`_CHANCE`, divided among *generated* plans."""
    allowed = _CHANCE / max(1, generated) * 2**rounds
    wins, ways = rounds, 1
    while ways <= allowed:
        wins -= 1
        ways += math.comb(rounds, wins)
    return wins + 1
