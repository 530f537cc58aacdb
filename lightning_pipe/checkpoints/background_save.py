"""Writes a checkpoint while training continues.

The state is copied to the host when the save starts, and a thread writes the copies. The threads of all ranks
communicate over a separate process group, so that their messages never mix with those of training.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from lightning_pipe._compat.torch import get_process_group_timeout


class HostCopySavePlanner(dcp.DefaultSavePlanner):
    """Save planner that holds host copies of this rank's part of a state, taken when the planner is created."""

    def __init__(self, state: dict[str, Any]) -> None:
        super().__init__()
        super().set_up_planner(state, is_coordinator=dist.get_rank() == 0)
        self._plan = super().create_local_plan()
        self._copies: dict[MetadataIndex, Any] = {}
        for item in self._plan.items:
            value = super().resolve_data(item)
            self._copies[item.index] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        self.state_dict = {}  # release the original tensors: only the copies are written

    def set_up_planner(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the constructor has already planned the save."""

    def create_local_plan(self) -> SavePlan:
        return self._plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._copies[write_item.index]


class BackgroundSave:
    """Runs saves on a background thread, in order. All ranks must call the same methods in the same order."""

    def __init__(self) -> None:
        group: Any = dist.new_group(backend="gloo", timeout=get_process_group_timeout())
        self.group: dist.ProcessGroup = group
        self._writer = ThreadPoolExecutor(1, "lightning_pipe checkpoint")
        self._saving: list[Future[None]] = []
        self._after: list[Callable[[], None]] = []

    def start(self, write: Callable[[], None]) -> None:
        """Wait for earlier saves, then call *write* on the background thread."""
        self.wait()
        self.add(write)

    def add(self, write: Callable[[], None]) -> Callable[[], None]:
        """Call *write* on the background thread after earlier saves."""
        saving = self._writer.submit(write)
        self._saving.append(saving)
        return partial(self._wait, saving)

    def add_success_callback(self, work: Callable[[], None]) -> None:
        """Register *work* to run in :meth:`wait` after all saves succeeded. If one fails, it is dropped."""
        self._after.append(work)

    @property
    def under_way(self) -> bool:
        """True from the start of a save until :meth:`wait` has collected its result."""
        return bool(self._saving)

    def wait(self) -> None:
        """Wait for all saves. If the wait is interrupted, they are still under way."""
        if not self._saving:
            return
        wait(self._saving)
        saved, after = self._saving, self._after
        self._saving, self._after = [], []
        for future in saved:
            future.result()
        for work in after:
            work()

    def _wait(self, saving: Future[None]) -> None:
        wait([saving])
        if saving in self._saving:
            self._saving.remove(saving)
            saving.result()

    def close(self) -> None:
        """Wait for the thread, which uses the process group, and then destroy the group."""
        self._writer.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group(self.group)
