"""What time it is on another rank: clocks of several machines, read on one of them.

Two ranks exchange messages; the other's clock was read between the send and the receive of this one's, so the middle of
the two is wrong by half the round trip at most. The shortest of some round trips says most. Source: Cristian,
"Probabilistic clock synchronization" (1989).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

_ROUNDS = 10


@dataclass(frozen=True)
class ClockOffset:
    """How far a rank's ``time.perf_counter`` is behind rank 0's.

    Args:
        at: when that was measured, on the rank's own clock (seconds).
        seconds: to add to the rank's clock.
        error: by which that may be wrong (seconds).
    """

    at: float
    seconds: float
    error: float


def measure_offset(group: dist.ProcessGroup | None) -> ClockOffset:
    """This rank's offset; every rank of *group* calls it, and nothing else uses the group meanwhile.

    Some 20 messages a rank, one rank after the other.

    Args:
        group: of CPU tensors; ``None`` for a rank that is alone.
    """
    if group is None:
        return ClockOffset(time.perf_counter(), 0.0, 0.0)
    ping, pong = torch.zeros(1), torch.zeros(3, dtype=torch.float64)
    if dist.get_rank(group) == 0:
        for rank in range(1, dist.get_world_size(group)):
            dist.recv(ping, group=group, group_src=rank)  # it is there: the first trip would take in its delay
            best = min((_round_trip(group, rank, ping, pong) for _ in range(_ROUNDS)), key=lambda found: found[2])
            dist.send(torch.tensor(best, dtype=torch.float64), group=group, group_dst=rank)
        return ClockOffset(time.perf_counter(), 0.0, 0.0)
    dist.send(ping, group=group, group_dst=0)
    for _ in range(_ROUNDS):
        dist.recv(ping, group=group, group_src=0)
        pong[0] = time.perf_counter()
        dist.send(pong, group=group, group_dst=0)
    dist.recv(pong, group=group, group_src=0)
    return ClockOffset(*pong.tolist())


def _round_trip(
    group: dist.ProcessGroup, rank: int, ping: torch.Tensor, pong: torch.Tensor
) -> tuple[float, float, float]:
    before = time.perf_counter()
    dist.send(ping, group=group, group_dst=rank)
    dist.recv(pong, group=group, group_src=rank)
    after = time.perf_counter()
    other = float(pong[0])
    return other, (before + after) / 2 - other, (after - before) / 2


def to_first_rank(begin: ClockOffset, end: ClockOffset) -> Callable[[float], float]:
    """A rank's clock to rank 0's, from two measurements; between them the one is taken to drift off evenly."""
    elapsed = end.at - begin.at
    drift = (end.seconds - begin.seconds) / elapsed if elapsed > 0 else 0.0
    return lambda moment: moment + begin.seconds + drift * (moment - begin.at)
