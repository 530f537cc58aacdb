"""Offsets between the clocks of ranks on different machines.

Rank 0 sends a message and the other rank replies with its clock, which it reads between rank 0's send and receive. The
midpoint of the two is therefore wrong by at most half the round-trip time. The shortest of several round trips gives
the smallest error. Source: Cristian, "Probabilistic clock synchronization" (1989).

Processes of one machine read the same clock, so their offset is exactly 0. Round trips on a busy machine take
milliseconds, and their midpoint would reverse the order of short tasks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

import torch
import torch.distributed as dist

_ROUNDS = 10


@dataclass(frozen=True)
class ClockOffset:
    """Offset of rank 0's ``time.perf_counter`` relative to a rank's clock."""

    measured_at: float
    seconds: float
    error: float


def measure_offset(group: dist.ProcessGroup | None) -> ClockOffset:
    """Measure the offset of this rank's clock, with about 20 messages per rank of the otherwise idle CPU *group*."""
    if group is None:
        return ClockOffset(time.perf_counter(), 0.0, 0.0)
    ping, pong = torch.zeros(1), torch.zeros(3, dtype=torch.float64)
    if dist.get_rank(group) == 0:
        for rank in range(1, dist.get_world_size(group)):
            dist.recv(ping, group=group, group_src=rank)  # the rank is ready; its delay must not count as a round trip
            rank_time, seconds, error = min(
                (_measure_offset_once(group, rank, ping, pong) for _ in range(_ROUNDS)), key=itemgetter(2)
            )
            # An offset within the error of 0 is 0: clocks of two machines differ by the time between their starts.
            best = (rank_time, 0.0, 0.0) if abs(seconds) <= error else (rank_time, seconds, error)
            dist.send(torch.tensor(best, dtype=torch.float64), group=group, group_dst=rank)
        return ClockOffset(time.perf_counter(), 0.0, 0.0)
    dist.send(ping, group=group, group_dst=0)
    for _ in range(_ROUNDS):
        dist.recv(ping, group=group, group_src=0)
        pong[0] = time.perf_counter()
        dist.send(pong, group=group, group_dst=0)
    dist.recv(pong, group=group, group_src=0)
    return ClockOffset(*pong.tolist())


def _measure_offset_once(
    group: dist.ProcessGroup, rank: int, ping: torch.Tensor, pong: torch.Tensor
) -> tuple[float, float, float]:
    before = time.perf_counter()
    dist.send(ping, group=group, group_dst=rank)
    dist.recv(pong, group=group, group_src=rank)
    after = time.perf_counter()
    rank_time = float(pong[0])
    return rank_time, (before + after) / 2 - rank_time, (after - before) / 2


def make_clock_converter(begin: ClockOffset, end: ClockOffset) -> Callable[[float], float]:
    """Conversion from a rank's clock to rank 0's, from two measurements with linear drift in between."""
    elapsed = end.measured_at - begin.measured_at
    drift = (end.seconds - begin.seconds) / elapsed if elapsed > 0 else 0.0
    return lambda moment: moment + begin.seconds + drift * (moment - begin.measured_at)
