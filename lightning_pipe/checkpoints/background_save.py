"""Writes a checkpoint while training goes on.

What is saved is copied to the host when the save begins; a thread writes the copies. It talks to the other ranks'
threads over a process group that nothing else uses, so its messages are never mixed up with those of training.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

__all__ = ["BackgroundSave", "HostCopies"]


class HostCopies(dcp.DefaultSavePlanner):
    """What this rank writes of a state, as it was when this was made: ``torch.distributed.checkpoint`` takes it so.

    Args:
        state: this rank's part; its tensors are copied to the host, anything else is pickled.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        super().set_up_planner(state, is_coordinator=dist.get_rank() == 0)
        self._plan = super().create_local_plan()
        self._copies: dict[MetadataIndex, Any] = {}
        for item in self._plan.items:
            value = super().resolve_data(item)
            self._copies[item.index] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        self.state_dict = {}  # what it copied is not kept alive, nor looked at again

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to do."""

    def create_local_plan(self) -> SavePlan:
        return self._plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._copies[write_item.index]


class BackgroundSave:
    """One save at a time, on a thread of its own; all ranks call the same methods in the same order.

    Args:
        timeout: how long a rank waits for another; PyTorch's default where there is none.
    """

    def __init__(self, timeout: timedelta | None) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        self._writer = ThreadPoolExecutor(1, "lightning_pipe checkpoint")
        self._saving: Future[None] | None = None
        self._after: list[Callable[[], None]] = []

    def start(self, write: Callable[[], None]) -> None:
        """Write in the background, once the save before this is done.

        Raises:
            SetupError: on every rank, if that save failed on any.
        """
        self.wait()
        self._saving = self._writer.submit(write)

    def then(self, work: Callable[[], None]) -> None:
        """Do something when the save under way is done, in :meth:`wait`; if it fails, never."""
        self._after.append(work)

    @property
    def under_way(self) -> bool:
        """Whether a save was started that nobody has waited for."""
        return self._saving is not None

    def wait(self) -> None:
        """Wait for the save under way; after an interrupt it still is.

        Raises:
            SetupError: on every rank, if it failed on any.
        """
        if self._saving is None:
            return
        wait([self._saving])
        saved, after = self._saving, self._after
        self._saving, self._after = None, []
        saved.result()
        for work in after:
            work()

    def close(self) -> None:
        """Wait for the thread, which uses the group, and leave that."""
        self._writer.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group(self.group)
