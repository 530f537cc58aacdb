"""Measures the transfer time of messages between neighboring ranks of a pipeline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_SMALL, _LARGE = 8, 2**20  # bytes
_WARM_UPS = 3
_ROUND_TRIPS = 11


@dataclass(frozen=True)
class Link:
    """Link between two ranks, the same in both directions, in seconds."""

    latency: float
    seconds_per_byte: float

    def seconds(self, size: int) -> float:
        """Seconds for a message of ``size`` bytes."""
        return self.latency + size * self.seconds_per_byte


def neighbor_pairs(pp_size: int) -> list[tuple[int, int]]:
    """Pairs of ranks that exchange messages: a ring, since looped schedules send from the last rank to the first."""
    ring = [(rank, (rank + 1) % pp_size) for rank in range(pp_size)]
    return ring if pp_size > 2 else ring[: pp_size - 1]


def measure_links(
    group: dist.ProcessGroup, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> dict[tuple[int, int], Link]:
    """Measure round trips of messages; every rank of the group calls this.

    A message takes half of the median round trip. The group is the one that the pipeline uses, so its connections exist
    and their setup is not measured.
    """
    rank, links = dist.get_rank(group), {}
    small, large = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (_SMALL, _LARGE))
    for first, second in neighbor_pairs(dist.get_world_size(group)):
        if rank in (first, second):
            small_seconds, large_seconds = (
                _measure_one_way_seconds(group, data, rank == first, first + second - rank, clock)
                for data in (small, large)
            )
            if rank == first:
                links[first, second] = Link(small_seconds, max(large_seconds - small_seconds, 0.0) / (_LARGE - _SMALL))
    return links


def _measure_one_way_seconds(
    group: dist.ProcessGroup, data: Tensor, begins: bool, peer: int, clock: Callable[[], float]
) -> float:
    durations = []
    for _ in range(_WARM_UPS + _ROUND_TRIPS):
        begin = clock()
        for sends in (begins, not begins):
            if sends:
                dist.send(data, group=group, group_dst=peer)
            else:
                dist.recv(data, group=group, group_src=peer)
        if data.device.type != "cpu":
            torch.accelerator.synchronize(data.device)
        durations.append((clock() - begin) / 2)
    return statistics.median(durations[_WARM_UPS:])


def median_links(pipelines: Sequence[Mapping[tuple[int, int], Link]]) -> dict[tuple[int, int], Link]:
    """Medians of the links of several pipelines, by pair of ranks."""
    pairs = {
        pair: [pipeline[pair] for pipeline in pipelines if pair in pipeline]
        for pipeline in pipelines
        for pair in pipeline
    }
    return {
        pair: Link(
            statistics.median(link.latency for link in links),
            statistics.median(link.seconds_per_byte for link in links),
        )
        for pair, links in sorted(pairs.items())
    }
