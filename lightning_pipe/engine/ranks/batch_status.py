"""Status of each rank's next batch, a number and a flag, which every rank posts and collects from all.

A status is posted when the batch is fetched and collected one batch later, so that no rank waits for it. It travels in
a message that training sends anyway, or in a separate all-reduce::

    post      holds the status for a message if the previous one traveled in a message; otherwise starts an all-reduce
    take      gives the held status to a message
    collect   reads the message or the all-reduce; a status that is still held is reduced now

Ranks make the same calls in the same order, so they agree on how a status travels. This holds for calls of the thread
that posts; calls of other threads run at different times, and are given no status.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from lightning_pipe.engine.ranks.process_groups import new_group

STATUS_SIZE = 3  # numbers of a status, of which ranks need the smallest


class ReducedBatchStatus(NamedTuple):
    """Smallest and largest number that any rank posted, and True if any rank posted the flag."""

    least: int
    greatest: int
    flagged: bool


class StatusCarryingMessage(Protocol):
    """A message of each rank to all ranks, in which a status travels."""

    def wait_batch_statuses(self) -> Iterable[Sequence[int]]:
        """Wait for the messages, and return the status of each rank."""


class BatchStatusExchange:
    """Exchange of statuses between all ranks. Every rank must make the same calls."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._thread = 0  # the thread that posts
        self._held_status: tuple[int, ...] | None = None
        self._reduced: tuple[torch.Tensor, Any] | None = None
        self._message: StatusCarryingMessage | None = None
        self._saw_message = False  # since the last collect
        self._expects_message = False

    @property
    def group(self) -> dist.ProcessGroup:
        """CPU process group of all ranks, created on first use, for other exchanges while no status is posted."""
        if self._group is None:
            self._group = new_group(backend="gloo")
        return self._group

    def post(self, number: int, flag: bool) -> None:
        """Post a status to all ranks. The previous status must have been collected or forgotten."""
        # The minimum over ranks of number, -number and -flag gives the smallest and the largest number, and the flag.
        self._thread = threading.get_ident()
        self._held_status = number, -number, -int(flag)
        if not self._expects_message:
            self._reduce()

    def take_status_to_send(self, group: dist.ProcessGroup) -> tuple[int, ...] | None:
        """Return the status to send to the ranks of *group* in a message; :meth:`set_carrying_message` must follow."""
        if threading.get_ident() != self._thread or group.size() != dist.get_world_size():
            return None
        self._saw_message = True
        status, self._held_status = self._held_status, None
        return status

    def set_carrying_message(self, message: StatusCarryingMessage) -> None:
        """Collect the status that was taken from *message*."""
        self._message = message

    def collect(self) -> ReducedBatchStatus:
        """Wait until all ranks have posted, and return their statuses combined."""
        self._expects_message, self._saw_message = self._saw_message, False
        if self._message is not None:
            message, self._message = self._message, None
            least, negative, flags = map(min, zip(*message.wait_batch_statuses(), strict=True))
        else:
            if self._held_status is not None:
                self._reduce()
            assert self._reduced is not None
            (status, work), self._reduced = self._reduced, None
            work.wait()
            least, negative, flags = status.tolist()
        return ReducedBatchStatus(least, -negative, flags < 0)

    def discard_pending(self) -> None:
        """Wait for pending statuses, if any, and discard them."""
        reduced, self._reduced = self._reduced, None
        self._held_status = self._message = None
        self._expects_message = self._saw_message = False
        if reduced is not None:
            reduced[1].wait()

    def close(self) -> None:
        """Destroy the group, if it exists. The next use creates another one."""
        group, self._group = self._group, None
        self._reduced = self._held_status = self._message = None
        # The user may have destroyed the default process group, and with it all groups.
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)

    def _reduce(self) -> None:
        status, self._held_status = torch.tensor(self._held_status), None
        self._reduced = status, dist.all_reduce(status, dist.ReduceOp.MIN, group=self.group, async_op=True)
