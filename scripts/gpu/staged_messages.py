"""Messages between two ranks on one GPU: Gloo cannot send CUDA tensors from rank to rank, so they go through the host.

The stages of a language model exchange activations in this way. Their kernels, streams and memory on the GPU are those
of a run with NCCL; the overlap of messages with them is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

__all__ = ["staged_messages"]


class _Received:
    """Work of a receipt, which copies the message to its tensor when it is waited for."""

    def __init__(self, work: dist.Work, message: Tensor, target: Tensor) -> None:
        self._work, self._message, self._target = work, message, target

    def wait(self, *arguments: Any) -> bool:
        done: bool = self._work.wait(*arguments)
        with torch.no_grad():
            self._target.copy_(self._message)
        return done

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class _Sent:
    """Work of a sending, which keeps the copy that is sent."""

    def __init__(self, work: dist.Work, message: Tensor) -> None:
        self._work, self._message = work, message

    def wait(self, *arguments: Any) -> bool:
        return bool(self._work.wait(*arguments))

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


@contextmanager
def staged_messages(through_host: Callable[[Tensor], bool] = lambda tensor: tensor.is_cuda) -> Iterator[None]:
    """Context in which ``isend`` and ``irecv``, also in batches, copy tensors to and from the host.

    Args:
        through_host: returns True for tensors that are copied (default: those of a GPU).
    """
    isend, irecv = dist.isend, dist.irecv

    def send(tensor: Tensor, *where: Any, **more: Any) -> Any:
        if not through_host(tensor):
            return isend(tensor, *where, **more)
        message = tensor.detach().to("cpu", copy=True)
        work = isend(message, *where, **more)
        return None if work is None else _Sent(work, message)

    def receive(tensor: Tensor, *where: Any, **more: Any) -> Any:
        if not through_host(tensor):
            return irecv(tensor, *where, **more)
        message = torch.empty_like(tensor, device="cpu")
        work = irecv(message, *where, **more)
        return None if work is None else _Received(work, message, tensor)

    def put(send_function: Any, receive_function: Any) -> None:
        for module in (dist, distributed_c10d):  # the second one compares the operations of a batch with its own
            module.isend, module.irecv = send_function, receive_function  # type: ignore[attr-defined]

    put(send, receive)
    try:
        yield
    finally:
        put(isend, irecv)
