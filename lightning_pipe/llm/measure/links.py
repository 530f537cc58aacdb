"""How long a message between neighbouring ranks of a pipeline is on its way, measured with a few."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Link", "measure_links", "median_links", "neighbours"]

_SMALL, _LARGE = 8, 2**20  # bytes
_WARM_UPS = 3
_ROUND_TRIPS = 11


@dataclass(frozen=True)
class Link:
    """Between two ranks, in either direction.

    Attributes:
        latency: seconds of a message of no bytes.
        seconds_per_byte: of each more.
    """

    latency: float
    seconds_per_byte: float

    def seconds(self, size: int) -> float:
        """Of a message of so many bytes."""
        return self.latency + size * self.seconds_per_byte


def neighbours(pp_size: int) -> list[tuple[int, int]]:
    """The pairs of ranks that schedules send messages between: in a ring, since loops go from the last to the first."""
    ring = [(rank, (rank + 1) % pp_size) for rank in range(pp_size)]
    return ring if pp_size > 2 else ring[: pp_size - 1]


def measure_links(
    group: dist.ProcessGroup, device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> dict[tuple[int, int], Link]:
    """Send messages to and fro; every rank of the group calls this.

    A message takes half of the median round trip. The group is the one that the pipeline sends in, so what setting its
    connections up costs, the first time, is not measured.

    Args:
        group: of the pipeline.
        device: of what is sent.
        clock: seconds.

    Returns:
        By pair of :func:`neighbours` that begins with this rank.
    """
    rank, found = dist.get_rank(group), {}
    small, large = (torch.zeros(size, dtype=torch.uint8, device=device) for size in (_SMALL, _LARGE))
    for first, second in neighbours(dist.get_world_size(group)):
        if rank in (first, second):
            one, other = (_one_way(group, data, rank == first, first + second - rank, clock) for data in (small, large))
            if rank == first:
                found[first, second] = Link(one, max(other - one, 0.0) / (_LARGE - _SMALL))
    return found


def _one_way(group: dist.ProcessGroup, data: Tensor, begins: bool, other: int, clock: Callable[[], float]) -> float:
    taken = []
    for _ in range(_WARM_UPS + _ROUND_TRIPS):
        begin = clock()
        for sends in (begins, not begins):
            if sends:
                dist.send(data, group=group, group_dst=other)
            else:
                dist.recv(data, group=group, group_src=other)
        if data.device.type != "cpu":
            torch.accelerator.synchronize(data.device)
        taken.append((clock() - begin) / 2)
    return statistics.median(taken[_WARM_UPS:])


def median_links(found: Sequence[Mapping[tuple[int, int], Link]]) -> dict[tuple[int, int], Link]:
    """Of the ranks of several pipelines: by pair, each number's median."""
    pairs = {pair: [one[pair] for one in found if pair in one] for one in found for pair in one}
    return {
        pair: Link(
            statistics.median(link.latency for link in links),
            statistics.median(link.seconds_per_byte for link in links),
        )
        for pair, links in sorted(pairs.items())
    }
