"""The input dist of all pipelined modules, with their splits in one all-to-all.

For each of its shardings, a sharded module's ``input_dist`` first sends splits (the number of values for each rank) and
then the tensors. While this thread is *fusing*, the replaced forwards of the ``KJTAllToAll`` modules return their data
instead of sending it, and TorchRec's ``FusedKJTListSplitsAwaitable`` sends all splits together. At other times and on
other threads, the replaced forwards work as the original ones, on the module's process group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.dist_data import KJTAllToAll, SplitsAllToAllAwaitable
from torchrec.distributed.embedding_sharding import (
    FusedKJTListSplitsAwaitable,
    KJTListSplitsAwaitable,
    KJTSplitsAllToAllMeta,
)
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe._compat.torchrec import forward_through, set_splits
from lightning_pipe.recsys.modules.ids_on_wire import SentAsInt32

_this_thread = threading.local()


@contextmanager
def fusing() -> Iterator[None]:
    """Context in which input dists on this thread return their splits instead of sending them."""
    _this_thread.fusing = True
    try:
        yield
    finally:
        _this_thread.fusing = False


class FusableAllToAll:
    """Replaces the forward of one ``KJTAllToAll`` between ``install`` and ``restore``."""

    def __init__(self, all_to_all: KJTAllToAll, group: dist.ProcessGroup, int32: bool = False) -> None:
        self._all_to_all = all_to_all
        self._original = all_to_all.forward
        self._int32 = int32 and group.size() > 1  # a single rank sends no ids
        self._fused = forward_through(all_to_all, group)

    def __call__(self, features: KeyedJaggedTensor) -> Any:
        if not getattr(_this_thread, "fusing", False):
            return self._original(features)
        return self._fused(SentAsInt32.of(features) if self._int32 else features)

    def install(self) -> None:
        self._all_to_all.forward = self

    def restore(self) -> None:
        self._all_to_all.__dict__.pop("forward", None)


class SplitsWithStatus(Awaitable[list[list[int]]]):
    """Splits in flight, followed by a status for each rank: 1 from a rank that has no splits to send, otherwise 0."""

    def __init__(self, rows: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        super().__init__()
        self._on_their_way = SplitsAllToAllAwaitable([*rows, torch.zeros_like(rows[0])], group)
        self._received: list[list[int]] | None = None

    def any_failed(self) -> bool:
        """Wait for the splits. Return True if any rank has sent none."""
        return any(self._all()[-1])

    def _wait_impl(self) -> list[list[int]]:
        return self._all()[:-1]

    def _all(self) -> list[list[int]]:
        if self._received is None:
            self._received = self._on_their_way.wait()
        return self._received


@dataclass
class SplitsRequest:
    """The splits of some modules in flight, with one awaitable for all modules, or one for each."""

    names: list[str]
    awaitables: list[Awaitable[Any]]
    status: SplitsWithStatus | None = None

    def any_failed(self) -> bool:
        """Wait for the splits. Return True if any rank reported with its splits that it has none."""
        return self.status is not None and self.status.any_failed()

    def wait(self) -> dict[str, Awaitable[Any]]:
        """Wait for the splits, submit the all-to-alls of the tensors, and return each module's awaitable for them."""
        results = [awaitable.wait() for awaitable in self.awaitables]
        fused = len(results) == 1 and isinstance(self.awaitables[0], FusedKJTListSplitsAwaitable)
        return dict(zip(self.names, results[0] if fused else results, strict=True))


def splits_length(requests: dict[str, KJTListSplitsAwaitable[Any]]) -> int:
    """Return the number of rows of splits that these requests send to a rank, equal for all ranks and batches."""
    return sum(len(part.splits_tensors) for part in _fusable_parts(requests))


def send_splits(
    requests: dict[str, KJTListSplitsAwaitable[Any]], contexts: dict[str, Any], with_status: bool = False
) -> SplitsRequest:
    """Submit the splits of all modules in one all-to-all. Splits that ``input_dist`` has sent already are unchanged."""
    names = list(requests)
    parts = _fusable_parts(requests)
    if not parts:  # without splits: a single process, or only data-parallel tables
        return SplitsRequest(names, list(requests.values()))
    group = parts[0].pg
    in_order = [contexts[name] for name in names]
    fused = FusedKJTListSplitsAwaitable(list(requests.values()), in_order, pg=None if with_status else group)
    if not with_status:
        return SplitsRequest(names, [fused])
    # A request without a group has not sent its splits.
    status = SplitsWithStatus([row for part in parts for row in part.splits_tensors], group)
    set_splits(fused, status)
    return SplitsRequest(names, [fused], status)


def _fusable_parts(requests: dict[str, KJTListSplitsAwaitable[Any]]) -> list[KJTSplitsAllToAllMeta]:
    parts = [part for request in requests.values() for part in request.awaitables]
    return [part for part in parts if isinstance(part, KJTSplitsAllToAllMeta)]


def answer_without_splits(
    length: int, group: dist.ProcessGroup, device: torch.device, with_status: bool = False
) -> dist.Work | None:
    """Submit data in place of splits on a rank that has none, so that an all-to-all of ``length`` rows completes."""
    if not length:
        return None
    rows = torch.zeros(group.size(), length + with_status, dtype=torch.int64, device=device)
    if with_status:
        rows[:, -1] = 1
    rows = rows.flatten()
    return dist.all_to_all_single(torch.empty_like(rows), rows, group=group, async_op=True)
