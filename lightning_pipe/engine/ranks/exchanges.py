"""All-to-alls between machines, over Gloo, that go both ways at once.

Gloo's all-to-all sends before it is ready to receive. Where two ranks begin at the same moment, on a link that queues,
each one's word that it is ready waits behind what it sends: one direction goes after the other, every third time or
nearly every time. Here an all-to-all is messages between two ranks each, and every rank is ready for all of them before
it sends any. Between processes of one machine that gains nothing, and Gloo's is left as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe._compat.torch import backend_of
from lightning_pipe.engine.ranks.together import shares_host

__all__ = ["exchanging", "gains_from_messages"]

_CPU = torch.device("cpu")
# Numbers of messages are int32, and start again behind the last.
_TAGS = 2**31
_GivenUp = dict[int, tuple[list[Any], tuple[Tensor, ...]]]


def gains_from_messages(group: dist.ProcessGroup) -> bool:
    """Whether *group* is Gloo's and across machines; all ranks of it call this."""
    if group.size() == 1 or dist.get_backend(group) != "gloo":
        return False
    if not isinstance(backend_of(group), dist.ProcessGroupGloo):
        return False  # PyTorch's detailed debugging looks at each collective
    return not shares_host(group)


def exchanging(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """What to give ``torch.distributed.all_to_all_single`` for *group*; all ranks of it call this.

    Args:
        group: made for the caller; from here on no messages (``send``, ``recv``) of others may travel in it.

    Returns:
        Where that gains something, what exchanges tensors on the CPU as this module says, and is *group* for whatever
        else is asked of it; else *group*.
    """
    return cast(dist.ProcessGroup, _Exchanging(group)) if gains_from_messages(group) else group


class _Exchanging:
    """A process group with another all-to-all.

    Args:
        group: all else is done by it; PyTorch, which keeps what it knows of groups in dictionaries, takes one for the
            other.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._gloo: Any = backend_of(group)
        self._rank, self._size = group.rank(), group.size()
        self._count = 0
        # By number, of exchanges that nobody can wait for any more: messages, and the memory they use until they end.
        self._given_up: _GivenUp = {}

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
        """As ``ProcessGroup.all_to_all_single``: every rank sends rows of its *input* to each.

        Args:
            output: (sum of *output_splits*, …), filled.
            input: (sum of *input_splits*, …).
            output_splits: rows from each rank; none for as many from each.
            input_splits: rows to each rank; none for as many to each.
            options: of the group's own.

        Raises:
            ValueError: tensors or splits that do not fit each other; before anything is sent.
        """
        if input.device != _CPU or output.device != _CPU:
            name = "all_to_all_single" if hasattr(self._group, "all_to_all_single") else "alltoall_base"
            return getattr(self._group, name)(output, input, output_splits, input_splits, options)
        sent = self._parts("input", input, input_splits)
        received = self._parts("output", output, output_splits)
        if sent[self._rank].shape != received[self._rank].shape:
            raise ValueError(
                f"rank {self._rank} sends itself {list(sent[self._rank].shape)} and is to receive"
                f" {list(received[self._rank].shape)}; give input and output splits that agree on it"
            )
        tag = self._count % _TAGS
        self._count += 1
        others = [(self._rank + distance) % self._size for distance in range(1, self._size)]
        # Both ranks know of messages without anything in them, which are none.
        works = [self._gloo.recv([received[other]], other, tag) for other in others if received[other].numel()]
        works += [self._gloo.send([sent[other]], other, tag) for other in others if sent[other].numel()]
        with torch.no_grad():  # as Gloo, which knows of no gradients
            received[self._rank].copy_(sent[self._rank])
        return _Exchange(works, (output, input), self._count, self._given_up)

    # Its name before torch 2.13.
    alltoall_base = all_to_all_single

    def _parts(self, what: str, tensor: Tensor, splits: list[int]) -> Sequence[Tensor]:
        rows = tensor.shape[0] if tensor.dim() else 0
        if not tensor.is_contiguous():
            raise ValueError(
                f"the {what} of an all-to-all has strides {tensor.stride()}; needed is one without gaps: call"
                " contiguous()"
            )
        if splits and (len(splits) != self._size or sum(splits) != rows):
            raise ValueError(
                f"the {what} of an all-to-all has {rows} rows, and splits {splits}; needed are {self._size} numbers"
                f" that add up to {rows}"
            )
        if not splits and rows % self._size:
            raise ValueError(
                f"the {what} of an all-to-all has {rows} rows, which {self._size} ranks cannot have as many of each;"
                " give splits"
            )
        parts: Sequence[Tensor] = torch.split(tensor, splits or [rows // self._size] * self._size)
        return parts


class _Exchange(dist.Work):
    """Messages under way. TorchRec waits for nothing that is no ``Work``.

    Args:
        works: of each; the first of them receive.
        tensors: whose memory they use.
        number: counts exchanges of the group.
        given_up: of the group; where works and tensors stay if nobody waits for this one, until one behind it has
            ended, when they have too, or are about to.
    """

    def __init__(self, works: list[Any], tensors: tuple[Tensor, Tensor], number: int, given_up: _GivenUp) -> None:
        super().__init__()
        self._works = works
        self._tensors: tuple[Tensor, ...] = tensors
        self._number = number
        self._given_up = given_up

    def __del__(self) -> None:
        if self._works:
            self._given_up[self._number] = self._works, self._tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Until all have been received and sent; the group's timeout is that of each, if there is no other.

        Raises:
            RuntimeError: a rank has left, or the time is over.
        """
        _wait(self._works, timeout)
        self._works, self._tensors = [], ()
        for number in [number for number in list(self._given_up) if number < self._number]:
            works, _tensors = self._given_up.pop(number, ([], ()))  # held until then
            _wait(works, timeout)
        return True

    def is_completed(self) -> bool:
        """Whether somebody has waited for it: Gloo's messages do not tell before."""
        return not self._works


def _wait(works: Sequence[Any], timeout: timedelta) -> None:
    for work in works:
        if timeout:
            work.wait(timeout)
        else:
            work.wait()
