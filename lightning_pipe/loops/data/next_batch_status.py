"""Status of each rank's next batch, a number and a flag, which every rank posts and collects from all.

A status is posted when the batch is fetched and collected one batch later, so that no rank waits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_pipe.engine.ranks.process_groups import new_group


class Collected(NamedTuple):
    """Smallest and largest number that any rank posted, and True if any rank posted the flag."""

    least: int
    greatest: int
    flagged: bool


class Statuses:
    """Exchange of statuses by an all-reduce in the background. Every rank must make the same calls.

    The CPU process group *group* must not be used by other work while statuses are in flight.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._round: tuple[torch.Tensor, Any] | None = None

    def post(self, number: int, flag: bool) -> None:
        """Post a status to all ranks. The previous status must have been collected or forgotten."""
        # The minimum over ranks of number, -number and -flag gives the smallest and the largest number, and the flag.
        said = torch.tensor([number, -number, -int(flag)])
        self._round = said, dist.all_reduce(said, dist.ReduceOp.MIN, group=self._group, async_op=True)

    def collect(self) -> Collected:
        """Wait until all ranks have posted, and return their statuses combined."""
        assert self._round is not None
        (said, work), self._round = self._round, None
        work.wait()
        least, negative, flags = said.tolist()
        return Collected(least, -negative, flags < 0)

    def forget(self) -> None:
        """Wait for pending statuses, if any, and discard them."""
        pending, self._round = self._round, None
        if pending is not None:
            pending[1].wait()


class StatusGroup:
    """CPU process group of all ranks with an exchange of statuses, created on first use."""

    def __init__(self) -> None:
        self._opened: tuple[dist.ProcessGroup, Statuses] | None = None

    def open(self) -> tuple[dist.ProcessGroup, Statuses]:
        """Return the group and the exchange, and create them on the first call. Every rank must call this."""
        if self._opened is None:
            group = new_group(backend="gloo")
            self._opened = group, Statuses(group)
        return self._opened

    def close(self) -> None:
        """Destroy the group, if it exists."""
        opened, self._opened = self._opened, None
        # The user may have destroyed the default process group, and with it all groups.
        if opened is not None and dist.is_initialized():
            dist.destroy_process_group(opened[0])
