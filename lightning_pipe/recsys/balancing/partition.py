"""Assignment of the samples of a global batch to ranks with nearly equal workloads.

Samples are assigned one by one, the largest first, to the rank with the smallest load that has room (Graham, "Bounds on
Multiprocessing Timing Anomalies", 1969). Every rank keeps its number of samples. Shapes therefore stay the same, and a
rank that was given few samples, because it has less memory or the data end, does not get more. Ties are broken by
index, so the result is the same on every rank.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

Workloads = npt.NDArray[np.float64]
Ranks = npt.NDArray[np.int32]


def partition_samples(workloads: Workloads, source: Ranks, ranks: int) -> Ranks:
    """Assign every sample to a rank. If that does not make the largest load smaller, every sample stays on its rank."""
    assignment = np.empty_like(source)
    capacity = np.bincount(source, minlength=ranks).tolist()
    open_ranks = [(0.0, rank) for rank in range(ranks) if capacity[rank]]
    order = np.argsort(-workloads, kind="stable")
    for sample, workload in zip(order.tolist(), workloads[order].tolist(), strict=True):
        load, rank = open_ranks[0]
        assignment[sample] = rank
        capacity[rank] -= 1
        if capacity[rank]:
            heapq.heapreplace(open_ranks, (load + workload, rank))
        else:
            heapq.heappop(open_ranks)
    better = (
        sum_workloads_by_rank(workloads, assignment, ranks).max()
        < sum_workloads_by_rank(workloads, source, ranks).max()
    )
    return assignment if better else source.copy()


def sum_workloads_by_rank(workloads: Workloads, rank_of: Ranks, ranks: int) -> Workloads:
    """Sum of the workloads of each rank."""
    return np.bincount(rank_of, weights=workloads, minlength=ranks).astype(np.float64, copy=False)


def imbalance(loads: Workloads) -> float:
    """Largest load divided by the mean load; 1.0 is perfect balance, and also the result if all loads are 0."""
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean > 0 else 1.0
