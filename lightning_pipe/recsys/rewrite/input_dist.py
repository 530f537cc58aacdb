"""The input dist of all pipelined modules at once: their splits travel in one all-to-all.

A sharded module's ``input_dist`` sends, for each of its shardings, first splits (how many values go where) and then
the tensors. While this thread is *fusing*, the replaced forwards of the ``KJTAllToAll`` inside return what they would
send; TorchRec's ``FusedKJTListSplitsAwaitable`` sends the splits of all of them together. At any other time, and on any
other thread, the replaced forwards do what they did before: on the module's own process group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
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

__all__ = [
    "FusableAllToAll",
    "SplitsRequest",
    "answer_without_splits",
    "fusing",
    "send_splits",
    "splits_length",
]

_this_thread = threading.local()


@contextmanager
def fusing() -> Iterator[None]:
    """Within it, on this thread, input dists return the splits to send instead of sending them."""
    _this_thread.fusing = True
    try:
        yield
    finally:
        _this_thread.fusing = False


class FusableAllToAll:
    """Stands in for the forward of one ``KJTAllToAll`` between ``install`` and ``restore``.

    Args:
        all_to_all: the module whose forward is replaced.
        group: sends while fusing; at other times the module's own group does.
        int32: send ids so while fusing.
    """

    def __init__(self, all_to_all: KJTAllToAll, group: dist.ProcessGroup, int32: bool = False) -> None:
        self._all_to_all = all_to_all
        self._original = all_to_all.forward
        self._int32 = int32 and group.size() > 1  # alone, a rank sends nothing
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
    """Splits on their way, and behind them, to each rank, a 0: it is 1 from a rank that has none to send.

    Args:
        rows: of splits, each with a number for each rank.
        group: sends them.
    """

    def __init__(self, rows: list[torch.Tensor], group: dist.ProcessGroup) -> None:
        super().__init__()
        self._on_their_way = SplitsAllToAllAwaitable([*rows, torch.zeros_like(rows[0])], group)
        self._received: list[list[int]] | None = None

    def any_failed(self) -> bool:
        """Waits; whether any rank has none."""
        return any(self._all()[-1])

    def _wait_impl(self) -> list[list[int]]:
        return self._all()[:-1]

    def _all(self) -> list[list[int]]:
        if self._received is None:
            self._received = self._on_their_way.wait()
        return self._received


class SplitsRequest:
    """The splits on their way for some modules, fused or not.

    Args:
        names: the modules.
        awaitables: one that waits for all of them, or one for each.
        status: what says, with the splits, whether other ranks have some; None where something else does.
    """

    def __init__(
        self, names: list[str], awaitables: list[Awaitable[Any]], status: SplitsWithStatus | None = None
    ) -> None:
        self._names = names
        self._awaitables = awaitables
        self._status = status

    def any_failed(self) -> bool:
        """Waits; whether a rank has said with its splits that it has none."""
        return self._status is not None and self._status.any_failed()

    def wait(self) -> dict[str, Awaitable[Any]]:
        """Waits for the splits, submits the tensors' all-to-alls and returns each module's awaitable for them."""
        results = [awaitable.wait() for awaitable in self._awaitables]
        fused = len(results) == 1 and isinstance(self._awaitables[0], FusedKJTListSplitsAwaitable)
        return dict(zip(self._names, results[0] if fused else results, strict=True))


def splits_length(requests: dict[str, KJTListSplitsAwaitable[Any]]) -> int:
    """How many rows of splits these requests send to each rank; equal on all ranks and for all batches alike."""
    return sum(len(part.splits_tensors) for part in _fusable_parts(requests))


def send_splits(
    requests: dict[str, KJTListSplitsAwaitable[Any]], contexts: dict[str, Any], with_status: bool = False
) -> SplitsRequest:
    """Submits the splits of all modules in one all-to-all; what ``input_dist`` has sent already is left as it is.

    Args:
        requests: of each module's input dist.
        contexts: of each module.
        with_status: tell the others that there are some; on all ranks alike, and only where splits are sent.
    """
    names = list(requests)
    parts = _fusable_parts(requests)
    if not parts:  # one process, or nothing but data-parallel tables: there are no splits
        return SplitsRequest(names, list(requests.values()))
    group = parts[0].pg
    in_order = [contexts[name] for name in names]
    fused = FusedKJTListSplitsAwaitable(list(requests.values()), in_order, pg=None if with_status else group)
    if not with_status:
        return SplitsRequest(names, [fused])
    # Without a group, it has not sent them.
    status = SplitsWithStatus([row for part in parts for row in part.splits_tensors], group)
    set_splits(fused, status)
    return SplitsRequest(names, [fused], status)


def _fusable_parts(requests: dict[str, KJTListSplitsAwaitable[Any]]) -> list[KJTSplitsAllToAllMeta]:
    parts = [part for request in requests.values() for part in request.awaitables]
    return [part for part in parts if isinstance(part, KJTSplitsAllToAllMeta)]


def answer_without_splits(
    length: int, group: dist.ProcessGroup, device: torch.device, with_status: bool = False
) -> dist.Work | None:
    """What a rank submits that has no splits to send, so that the others' all-to-all of ``length`` rows completes.

    Args:
        length: see ``splits_length``.
        group: sends splits.
        device: of the splits.
        with_status: as for ``send_splits``: the others get to know it from here.
    """
    if not length:
        return None
    rows = torch.zeros(group.size(), length + with_status, dtype=torch.int64, device=device)
    if with_status:
        rows[:, -1] = 1
    rows = rows.flatten()
    return dist.all_to_all_single(torch.empty_like(rows), rows, group=group, async_op=True)
