"""Full-duplex all-to-all between machines with Gloo.

Gloo's all-to-all sends before it is ready to receive. If two ranks start at the same moment on a link with a queue,
each rank's message that it is ready to receive is queued after the data that it sends. The two directions then run
sequentially, in a third of all calls up to nearly all of them. Here an all-to-all consists of point-to-point messages,
and every rank posts all receives before its first send. Between processes of one machine this has no benefit, and
Gloo's all-to-all is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe._compat.torch import ALL_TO_ALL_SINGLE, get_backend_object
from lightning_pipe.engine.ranks.object_collectives import is_single_host

_CPU = torch.device("cpu")
# Message tags are int32 and wrap around.
_TAGS = 2**31
_Abandoned = dict[int, tuple[list[Any], tuple[Tensor, ...]]]


def is_multi_host_gloo_group(group: dist.ProcessGroup) -> bool:
    """Return True if *group* uses Gloo and spans several machines. All ranks of the group call this."""
    if group.size() == 1 or dist.get_backend(group) != "gloo":
        return False
    if not isinstance(get_backend_object(group), dist.ProcessGroupGloo):
        return False  # wrapped by TORCH_DISTRIBUTED_DEBUG=DETAIL, which checks each collective
    return not is_single_host(group)


def wrap_full_duplex_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Wrap *group*, in which no other code may ``send`` or ``recv``, for ``torch.distributed.all_to_all_single``."""
    return cast(dist.ProcessGroup, _FullDuplexGroup(group)) if is_multi_host_gloo_group(group) else group


def unwrap_full_duplex_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group that :func:`wrap_full_duplex_group` wrapped: PyTorch gathers objects only in its own groups."""
    return group._group if isinstance(group, _FullDuplexGroup) else group


class _FullDuplexGroup:
    """Process group with a replaced all-to-all. It equals *group*, whose entries PyTorch's dictionaries then give."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._gloo: Any = get_backend_object(group)
        self._rank, self._size = group.rank(), group.size()
        self._count = 0
        # Works and tensors of abandoned exchanges, by number. They keep the memory alive until the messages have ended.
        self._abandoned: _Abandoned = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __eq__(self, other: object) -> bool:
        return other is self or other is self._group

    def __hash__(self) -> int:
        return hash(self._group)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any = None,
    ) -> Any:
        """Send rows of *input* to every rank, like ``ProcessGroup.all_to_all_single``."""
        if input.device != _CPU or output.device != _CPU:
            return getattr(self._group, ALL_TO_ALL_SINGLE)(output, input, output_splits, input_splits, options)
        sent, received = self._split_by_rank(input, input_splits), self._split_by_rank(output, output_splits)
        tag = self._count % _TAGS
        self._count += 1
        peers = [(self._rank + distance) % self._size for distance in range(1, self._size)]
        # Empty messages are skipped; both ranks know their size.
        works = [self._gloo.recv([received[peer]], peer, tag) for peer in peers if received[peer].numel()]
        works += [self._gloo.send([sent[peer]], peer, tag) for peer in peers if sent[peer].numel()]
        with torch.no_grad():  # like Gloo, which does not record gradients
            received[self._rank].copy_(sent[self._rank])
        return _AllToAllWork(works, (output, input), self._count, self._abandoned)

    # Name of the method before PyTorch 2.13.
    alltoall_base = all_to_all_single

    def _split_by_rank(self, tensor: Tensor, splits: list[int]) -> Sequence[Tensor]:
        parts: Sequence[Tensor] = torch.split(tensor, splits or [tensor.shape[0] // self._size] * self._size)
        return parts


class _AllToAllWork(dist.Work):
    """Pending messages of one exchange. A subclass of ``Work``, because TorchRec only waits for these."""

    def __init__(self, works: list[Any], tensors: tuple[Tensor, Tensor], number: int, abandoned: _Abandoned) -> None:
        super().__init__()
        self._works = works  # receives first
        self._tensors: tuple[Tensor, ...] = tensors
        self._number = number
        self._abandoned = abandoned

    def __del__(self) -> None:
        if self._works:  # not waited for: kept until a later exchange has ended, as then these have, or are about to
            self._abandoned[self._number] = self._works, self._tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until all messages are received and sent."""
        _wait(self._works, timeout)
        self._works, self._tensors = [], ()
        for number in [number for number in list(self._abandoned) if number < self._number]:
            works, _tensors = self._abandoned.pop(number, ([], ()))  # _tensors stay alive during the wait
            _wait(works, timeout)
        return True

    def is_completed(self) -> bool:
        """Return True after :meth:`wait`. Gloo does not report the completion of messages earlier."""
        return not self._works


def _wait(works: Sequence[Any], timeout: timedelta) -> None:
    for work in works:
        if timeout:
            work.wait(timeout)
        else:
            work.wait()
