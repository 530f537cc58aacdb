"""Status of each rank's next batch, a number and a flag, which every rank posts and collects from all.

A status is posted when the batch is fetched and collected one batch later, so that no rank waits for the collective.
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
    """Exchange of statuses over a CPU process group of its own. Every rank must make the same calls."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._round: tuple[torch.Tensor, Any] | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """CPU process group of all ranks, created on first use, for other exchanges while no status is posted."""
        if self._group is None:
            self._group = new_group(backend="gloo")
        return self._group

    def post(self, number: int, flag: bool) -> None:
        """Post a status to all ranks. The previous status must have been collected or forgotten."""
        # The minimum over ranks of number, -number and -flag gives the smallest and the largest number, and the flag.
        status = torch.tensor([number, -number, -int(flag)])
        self._round = status, dist.all_reduce(status, dist.ReduceOp.MIN, group=self.group, async_op=True)

    def collect(self) -> Collected:
        """Wait until all ranks have posted, and return their statuses combined."""
        assert self._round is not None
        (status, work), self._round = self._round, None
        work.wait()
        least, negative, flags = status.tolist()
        return Collected(least, -negative, flags < 0)

    def forget(self) -> None:
        """Wait for pending statuses, if any, and discard them."""
        pending, self._round = self._round, None
        if pending is not None:
            pending[1].wait()

    def close(self) -> None:
        """Destroy the group, if it exists. The next use creates another one."""
        group, self._group, self._round = self._group, None, None
        # The user may have destroyed the default process group, and with it all groups.
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
