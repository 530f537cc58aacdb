"""The input dist of all pipelined modules, with one wait of the host for all of them.

For each of its shardings, a sharded module's ``input_dist`` calls a ``KJTAllToAll``. While this thread is *fusing*, the
replaced forwards of these return an :class:`OutgoingFeatures` instead of sending it. At other times and on other
threads, they work as the original ones, on the module's process group.

    SplitsRequest         number of ids and batch size of each key, and statuses: one all-to-all for all modules
    SplitsRequest.wait_and_send_tensors    the only wait of the host, which must know the sizes of the next messages
    Tensors               lengths, ids and weights: one all-to-all each, of each part

The numbers of this rank reach the device in one copy that the host does not wait for. Those that only the device knows
are read together with those of the other ranks. TorchRec's ``FusedKJTListSplitsAwaitable`` and the awaitables that it
makes copy or read numbers for each part, and the host waits for each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_sharding import KJTListAwaitable, KJTListSplitsAwaitable
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.engine.ranks.batch_status import STATUS_SIZE, BatchStatusExchange
from lightning_pipe.engine.runtime.devices import current_stream
from lightning_pipe.recsys.batches.transfer import move_tensor_to_device
from lightning_pipe.recsys.rewrite.routes import KJTAllToAllRoute, OutgoingFeatures, TensorsRequest

_this_thread = threading.local()
# Position, from the end, of the number that tells that a rank has no sizes.
_FAILED = -STATUS_SIZE - 1


@contextmanager
def defer_input_dists() -> Iterator[None]:
    """Context in which input dists on this thread return their parts instead of sending them."""
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
        self._route = KJTAllToAllRoute(all_to_all, group, int32)

    def __call__(self, features: KeyedJaggedTensor) -> Any:
        return (
            OutgoingFeatures(self._route, features)
            if getattr(_this_thread, "fusing", False)
            else self._original(features)
        )

    def install(self) -> None:
        self._all_to_all.forward = self

    def restore(self) -> None:
        self._all_to_all.__dict__.pop("forward", None)


def collect_outgoing_features(request: KJTListSplitsAwaitable[Any]) -> list[OutgoingFeatures]:
    """Parts in the result of a module's ``input_dist``. Data-parallel tables have none."""
    return [part for part in request.awaitables if isinstance(part, OutgoingFeatures)]


class SplitsMessageLayout:
    """Positions of the numbers that ranks send to each other, equal for all batches.

    A rank makes all its numbers in the order of its parts: the ids of each key, then the batch size (or sizes). Two
    statuses follow: 1 if this rank has no sizes, and the numbers of the status of its next batch. ``order`` selects the
    numbers of each rank from it.
    """

    def __init__(self, routes: Sequence[KJTAllToAllRoute], device: torch.device) -> None:
        self.routes = routes
        self.group, self.device = routes[0].group, device
        self.lengths: list[slice] = []
        self.strides: list[slice] = []
        end = 0
        for route in routes:
            keys = route.bounds[-1]
            self.lengths.append(slice(end, end + keys))
            end += keys
            self.strides.append(slice(end, end + (keys if route.variable else 1)))
            end = self.strides[-1].stop
        self.size = end + 1 + STATUS_SIZE
        order: list[int] = []
        self.sent: list[int] = []
        for rank in range(self.group.size()):
            before = len(order)
            for route, lengths, strides in zip(routes, self.lengths, self.strides, strict=True):
                rank_keys = slice(route.bounds[rank], route.bounds[rank + 1])
                order += range(self.size)[lengths][rank_keys]
                order += range(self.size)[strides][rank_keys] if route.variable else [strides.start]
            order += range(end, self.size)
            self.sent.append(len(order) - before)
        self.received = self.sent[self.group.rank()]  # from each rank
        self.order = torch.tensor(order, device=device)  # waits for the copy, once: every later stream may use it


class PendingSizes:
    """Sizes and statuses that ranks have sent to each other, in flight.

    Args:
        layout: positions of the numbers.
        numbers: numbers of this rank on the device.
        is_known: True if the host knows the numbers of this rank.
    """

    def __init__(self, layout: SplitsMessageLayout, numbers: torch.Tensor, is_known: bool) -> None:
        self._layout = layout
        self._stream = current_stream(layout.device)
        self._numbers = None if is_known else numbers
        ranks = layout.group.size()
        self._received = numbers.new_empty(ranks * layout.received)
        self._work: Any = dist.all_to_all_single(
            output=self._received,
            input=numbers.index_select(0, layout.order),
            output_split_sizes=[layout.received] * ranks,
            input_split_sizes=layout.sent,
            group=layout.group,
            async_op=True,
        )
        self._rows: list[list[int]] | None = None
        self.numbers: list[int] = []  # of this rank, after the wait, if only the device knew them

    def wait(self) -> list[list[int]]:
        """Wait for the numbers, and return those that each rank sent to this one."""
        if self._rows is None:
            self._work.wait()
            received, size = self._received, self._layout.received
            numbers = (received if self._numbers is None else torch.cat([received, self._numbers])).tolist()
            end = len(received)
            self._rows = [numbers[start : start + size] for start in range(0, end, size)]
            self.numbers = numbers[end:]
        return self._rows

    def wait_batch_statuses(self) -> list[list[int]]:
        """Wait for the numbers, and return the status of each rank's next batch."""
        with torch.get_device_module(self._layout.device).stream(self._stream) if self._stream else nullcontext():
            return [row[-STATUS_SIZE:] for row in self.wait()]


class SplitsRequest:
    """The sizes of some modules' messages in flight.

    Args:
        layout: positions of the sizes; None without sizes to send (one process, or only data-parallel tables).
        requests: results of the modules' ``input_dist``; None if this rank has none, which is told to all ranks.
        contexts: TorchRec's context of each module.
        statuses: statuses that ranks send with the sizes (default None).
    """

    def __init__(
        self,
        layout: SplitsMessageLayout | None,
        requests: Mapping[str, KJTListSplitsAwaitable[Any]] | None,
        contexts: Mapping[str, Any],
        statuses: BatchStatusExchange | None = None,
    ) -> None:
        self._layout = layout
        self._requests = requests or {}
        self._contexts = contexts
        self._parts = [part for request in self._requests.values() for part in collect_outgoing_features(request)]
        if layout is None:
            return
        numbers = [0] * layout.size
        numbers[_FAILED] = int(requests is None)
        for part, lengths, strides in zip(self._parts, layout.lengths, layout.strides, strict=requests is not None):
            numbers[strides] = part.strides
            if part.lengths is not None:
                numbers[lengths] = part.lengths
        status = None if statuses is None else statuses.take_status_to_send(layout.group)
        if status is not None:
            numbers[-STATUS_SIZE:] = status
        sent = move_tensor_to_device(torch.tensor(numbers), layout.device)
        for part, lengths in zip(self._parts, layout.lengths, strict=requests is not None):
            if part.lengths is None:
                sent[lengths] = part.sum_lengths_per_key()
        self._sizes = PendingSizes(layout, sent, all(part.lengths is not None for part in self._parts))
        if statuses is not None and status is not None:
            statuses.set_carrying_message(self._sizes)

    def any_failed(self) -> bool:
        """Wait for the sizes. Return True if any rank has none."""
        return self._layout is not None and any(row[_FAILED] for row in self._sizes.wait())

    def wait_and_send_tensors(self) -> dict[str, Awaitable[Any]]:
        """Wait for the sizes, submit the all-to-alls of the tensors, and return each module's awaitable for them."""
        if self._layout is None:
            return {name: request.wait() for name, request in self._requests.items()}
        tensors = self._send_feature_tensors(self._layout)
        awaitables_by_name: dict[str, Awaitable[Any]] = {}
        for name, request in self._requests.items():
            context = self._contexts[name]
            awaitables = [
                next(tensors) if isinstance(part, OutgoingFeatures) else part.wait() for part in request.awaitables
            ]
            for awaitable, sharding in zip(awaitables, getattr(context, "sharding_contexts", ()), strict=False):
                if isinstance(awaitable, TensorsRequest):
                    awaitable.fill_sharding_context(sharding)
            awaitables_by_name[name] = KJTListAwaitable(awaitables, context)
        return awaitables_by_name

    def _send_feature_tensors(self, layout: SplitsMessageLayout) -> Iterator[TensorsRequest]:
        rows, end = self._sizes.wait(), 0
        for part, lengths in zip(self._parts, layout.lengths, strict=True):
            if part.lengths is None:
                part.lengths = self._sizes.numbers[lengths]
        for part in self._parts:
            number = part.route.number
            middle, start = end + number, end
            end = middle + (number if part.variable else 1)
            assert part.lengths is not None
            yield TensorsRequest(
                part, part.lengths, [row[start:middle] for row in rows], [row[middle:end] for row in rows]
            )
