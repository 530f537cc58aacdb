"""Assignment of the samples of a global batch to ranks with nearly equal workloads.

Every rank keeps its number of samples. Shapes therefore stay the same, and a rank that was given few samples, because
it has less memory or the data end, does not get more. The algorithm has five steps, with the same result on every rank:

1. Let k be the number of samples of the smallest rank. The largest k x ranks samples are divided into sets of k by the
   balanced largest differencing method: the sorted samples are cut into groups of one sample per rank. The two groups
   with the largest spread are merged, the largest set of the first with the smallest set of the second, until one
   group is left (Karmarkar and Karp, "The Differencing Method of Set Partitioning", 1982; for sets of equal size:
   Michiels, Korst, Aarts and van Leeuwen, "Performance Ratios for the Differencing Method Applied to the Balanced
   Number Partitioning Problem", 2003).
2. The sets are assigned to ranks, sets with smaller sums to ranks with more samples. Among ranks with equal numbers of
   samples, a set goes to the rank that already has most of its samples, so that few samples move.
3. If ranks have different numbers of samples, the remaining samples are assigned one by one, the largest first, to the
   rank with the smallest load that has room (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
4. Step 1 gives every rank one sample of each group, so it cannot compensate for a sample far larger than all others.
   The ranks with the largest and the smallest load therefore swap two samples, those whose difference is closest to
   half the difference of the loads. This repeats until the largest load is at most 0.1 % above the mean, no swap helps,
   or the limit of swaps is reached.
5. If the largest load is not smaller than before, every sample stays on its rank.

Ties are broken by index. The compiled version and the Python version compare and add the same numbers in the same
order.
"""

from __future__ import annotations

import ctypes
import heapq
from itertools import groupby

import numpy as np
import numpy.typing as npt

from lightning_pipe.recsys.kernels.native import library

# Imbalance at which swapping stops, and the maximum number of swaps per rank.
_ENOUGH = 1.001
_SWAPS = 8

Workloads = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.int32]


def partition(workloads: Workloads, source: Ranks, ranks: int) -> Ranks:
    """Assign every sample to a rank."""
    workloads = np.ascontiguousarray(workloads, np.float64)
    source = np.ascontiguousarray(source, np.int32)
    if ranks < 2 or not len(source):
        return source.copy()
    compiled = library()
    if compiled is not None:
        assignment = np.empty_like(source)
        failed = compiled.lp_partition(
            ctypes.c_int64(len(source)),
            workloads.ctypes.data_as(ctypes.c_void_p),
            source.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int64(ranks),
            ctypes.c_double(_ENOUGH),
            assignment.ctypes.data_as(ctypes.c_void_p),
        )
        if failed:
            raise MemoryError(f"out of memory while assigning {len(source)} samples to {ranks} ranks")
        return assignment
    return _in_python(workloads, source, ranks)


def loads_of(workloads: Workloads, rank_of: Ranks, ranks: int) -> Workloads:
    """Sum of the workloads of each rank."""
    return np.bincount(rank_of, weights=workloads, minlength=ranks).astype(np.float64, copy=False)


def imbalance(loads: Workloads) -> float:
    """Largest load divided by the mean load; 1.0 is perfect balance, and also the result if all loads are 0."""
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean > 0 else 1.0


# ---------------------------------------------------------------------- without the compiled library


class _Sets:
    """Disjoint sets of samples, one per rank, ordered by falling sum."""

    def __init__(self, sums: list[float], samples: list[list[int]]) -> None:
        self.sums = sums
        self.samples = samples

    @property
    def spread(self) -> float:
        return self.sums[0] - self.sums[-1]

    def merged(self, other: _Sets) -> _Sets:
        """Merge the sets of two groups, the largest with the smallest."""
        sums = [one + opposite for one, opposite in zip(self.sums, reversed(other.sums), strict=True)]
        falling = sorted(range(len(sums)), key=lambda index: -sums[index])
        for samples, opposite in zip(self.samples, reversed(other.samples), strict=True):
            samples.extend(opposite)
        return _Sets([sums[index] for index in falling], [self.samples[index] for index in falling])


def _in_python(workloads: Workloads, source: Ranks, ranks: int) -> Ranks:
    counts = np.bincount(source, minlength=ranks)
    groups = int(counts.min())
    order = np.argsort(-workloads, kind="stable")
    assignment = np.empty_like(source)
    loads = [0.0] * ranks
    if groups:
        sets = _difference(workloads, order[: groups * ranks].reshape(groups, ranks))
        for place, rank in enumerate(_ranks_of_sets(sets, source, counts)):
            loads[rank] = sets.sums[place]
            assignment[sets.samples[place]] = rank
    room = counts - groups
    open_ranks = [(loads[rank], rank) for rank in range(ranks) if room[rank]]
    heapq.heapify(open_ranks)
    for sample in order[groups * ranks :].tolist():
        load, rank = heapq.heappop(open_ranks)
        assignment[sample] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heappush(open_ranks, (load + float(workloads[sample]), rank))
    _swap(workloads, order, assignment, ranks)
    better = loads_of(workloads, assignment, ranks).max() < loads_of(workloads, source, ranks).max()
    return assignment if better else source.copy()


def _swap(workloads: Workloads, order: npt.NDArray[np.int64], assignment: Ranks, ranks: int) -> None:
    loads = loads_of(workloads, assignment, ranks)
    enough = _ENOUGH * (float(np.bincount(np.zeros_like(assignment), weights=workloads)[0]) / ranks)
    place_of = np.empty_like(order)  # place in falling order; among equal samples, the smaller index comes first
    place_of[order] = np.arange(len(order))
    falling = [order[assignment[order] == rank] for rank in range(ranks)]
    for _ in range(_SWAPS * ranks):
        most, least = int(loads.argmax()), int(loads.argmin())
        if not loads[most] > enough or not len(falling[most]) or not len(falling[least]):
            return
        big, small = workloads[falling[most]], workloads[falling[least]]
        gap = loads[most] - loads[least]
        place = np.searchsorted(-small, -(big - gap / 2), side="left")
        others = np.stack([np.maximum(place - 1, 0), np.minimum(place, len(small) - 1)], axis=1)
        best = int(np.abs((big[:, None] - small[others]) - gap / 2).argmin())
        give, take = best // 2, int(others.reshape(-1)[best])
        difference = big[give] - small[take]
        if not 0 < difference < gap:
            return
        loads[most] -= difference
        loads[least] += difference
        given, taken = falling[most][give], falling[least][take]
        assignment[given], assignment[taken] = least, most
        for rank, place_left, sample in ((most, give, taken), (least, take, given)):
            left = np.delete(falling[rank], place_left)
            falling[rank] = np.insert(left, np.searchsorted(place_of[left], place_of[sample]), sample)


def _difference(workloads: Workloads, groups: npt.NDArray[np.int64]) -> _Sets:
    made = [
        _Sets(sums, [[sample] for sample in samples])
        for sums, samples in zip(workloads[groups].tolist(), groups.tolist(), strict=True)
    ]
    # Equal spreads are ordered by the index at creation.
    joined = [(-sets.spread, index, sets) for index, sets in enumerate(made)]
    heapq.heapify(joined)
    count = len(made)
    while len(joined) > 1:
        _, _, one = heapq.heappop(joined)
        _, _, other = heapq.heappop(joined)
        sets = one.merged(other)
        heapq.heappush(joined, (-sets.spread, count, sets))
        count += 1
    return joined[0][2]


def _ranks_of_sets(sets: _Sets, source: Ranks, counts: npt.NDArray[np.int64]) -> list[int]:
    ranks = len(counts)
    overlap = [np.bincount(source[samples], minlength=ranks) for samples in sets.samples]
    found: dict[int, int] = {}
    begin = 0
    for _, alike in groupby(sorted(range(ranks), key=lambda rank: counts[rank]), key=lambda rank: counts[rank]):
        members = list(alike)
        places = range(begin, begin + len(members))
        taken = set()
        for _, rank, place in sorted((-overlap[place][rank], rank, place) for rank in members for place in places):
            if place not in found and rank not in taken:
                found[place] = rank
                taken.add(rank)
        begin += len(members)
    return [found[place] for place in range(ranks)]
