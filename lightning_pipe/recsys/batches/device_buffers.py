"""Copies batches into memory of batches that nobody holds any more, in place of asking the allocator for every batch.

    transfer(batch) ── .to(device) ──► aten._to_copy ──► _Copies ──► a buffer nobody holds, or a new one

What moves a batch (``to`` methods, a user's transfer hook) stays as it is: while it runs, a dispatch mode makes the
copies between devices, each into a buffer of its own. The n-th copy of a transfer has buffers of its own from batch to
batch, since batches are alike; a buffer that is too small makes way for a larger one.

A buffer is free again when nothing holds its storage. Two counts say so: the storage's own, which tensors, views,
graphs, NumPy arrays and DLPack capsules raise, and that of the one Python object that stands for the storage, which
``untyped_storage()`` raises. What is handed out is no view, so no ``_base`` leads to the buffer. Neither count
sees another process: memory sent through a queue of ``torch.multiprocessing`` is to be cloned first.

On a device with streams, work that was submitted may still read what nothing holds. So when a buffer is found free an
event is recorded on every stream that tasks have used batches on; the copies of the *next* transfer and later ones may
use it, behind those events. A stream of the user's own must be waited for by one of these before the batch is let go
of: ``record_stream`` only tells the allocator, which is not asked.

TorchRec's ``enable_inplace_copy_batch`` keeps no buffers: it allocates on the current stream and copies on another.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pipe.engine.runtime.record_use import streams_of_use

__all__ = ["DeviceBuffers"]

_ALIGNMENT = 512  # bytes, as CUDA's caching allocator rounds
_COPY = torch.ops.aten._to_copy.default


class DeviceBuffers:
    """The memory that batches are copied into, batch after batch.

    Args:
        device: where batches go.
        most_kept: the most buffers of each copy. Where more are held at once, the one held longest is left to its
            holder, whose memory it is from then on, like that of any tensor.

    Attributes:
        made: how many buffers were asked of the allocator so far.
        reused: how many copies went into one that was there.
    """

    def __init__(self, device: torch.device, most_kept: int = 8) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.made = 0
        self.reused = 0
        self._most_kept = most_kept
        self._buffers: defaultdict[int, list[_Buffer]] = defaultdict(list)
        self._transfers = 0
        self._lock = threading.Lock()  # a training and an evaluation may move batches in threads of their own

    def filled_by(self, transfer: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """*transfer*, its copies to the device made into buffers."""

        def move(batch: Any) -> Any:
            with _Copies(self, self._find_free()):
                return transfer(batch)

        return move

    def clear(self) -> None:
        """Keep none; those that are held stay good."""
        with self._lock:
            self._buffers.clear()

    def _find_free(self) -> int:
        """The number of the transfer that begins."""
        with self._lock:
            self._transfers += 1
            found = [one for buffers in self._buffers.values() for one in buffers if one.held and not one.in_use()]
            events = []
            if found and self.device.type == "cuda":
                events = [stream.record_event() for stream in streams_of_use(self.device)]
            for buffer in found:
                buffer.held, buffer.found_free, buffer.events = False, self._transfers, events
            return self._transfers

    def take(self, transfer: int, place: int, like: Tensor) -> Tensor:
        """A tensor of *like*'s shape and dtype, contiguous and not filled, for the copy *place* of a transfer."""
        size = like.numel() * like.element_size()
        with self._lock:
            buffers = self._buffers[place]
            buffers[:] = [one for one in buffers if one.held or one.intact()]
            # Events of this transfer come after work that the device has yet to do: the copy would wait for it.
            newest = transfer - 1 if self.device.type == "cuda" else transfer
            free = [one for one in buffers if not one.held and one.found_free <= newest]
            fitting = [one for one in free if one.size >= size]
            if fitting:
                buffer = min(fitting, key=lambda one: one.size)
                buffers.remove(buffer)
                self.reused += 1
            else:
                if free:
                    buffers.remove(min(free, key=lambda one: one.size))
                elif len(buffers) >= self._most_kept:
                    del buffers[0]
                buffer = _Buffer(size, self.device)
                self.made += 1
            buffers.append(buffer)
            buffer.held = True
            events, buffer.events = buffer.events, []
        for event in events:
            torch.cuda.current_stream(self.device).wait_event(event)
        with torch.device(self.device):
            return torch.empty(0, dtype=like.dtype).set_(buffer.storage, 0, like.shape, _strides(like.shape))


class _Buffer:
    """Memory that one tensor at a time is laid over.

    Attributes:
        size: in bytes, an eighth more than was asked for: lists of ids have other lengths in every batch.
        held: handed out, and not found free since.
        found_free: at the beginning of which transfer that was.
        events: after the work that was submitted until then.
    """

    __slots__ = ("_address", "_unused", "events", "found_free", "held", "size", "storage")

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = math.ceil(size * 9 / 8 / _ALIGNMENT) * _ALIGNMENT
        self.storage = torch.UntypedStorage(self.size, device=device)
        self._address = self.storage._cdata
        self._unused = self._counts()
        self.held = False
        self.found_free = 0
        self.events: list[Any] = []

    def in_use(self) -> bool:
        """Whether anything but this object holds the storage."""
        return self._counts() != self._unused

    def intact(self) -> bool:
        """Whether the memory is as it was made: a holder may have resized it, or shared it with a process."""
        return self.storage.nbytes() == self.size and (self.storage.is_cuda or not self.storage.is_shared())

    def _counts(self) -> tuple[int, int]:
        return torch._C._storage_Use_Count(self._address), sys.getrefcount(self.storage)


class _Copies(TorchDispatchMode):
    """Within it, on this thread, plain copies of contiguous tensors to the device go into buffers."""

    def __init__(self, buffers: DeviceBuffers, transfer: int) -> None:
        super().__init__()
        self._buffers = buffers
        self._transfer = transfer
        self._copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not _COPY or not self._can_copy(args[0], **kwargs):
            return func(*args, **kwargs)
        source = args[0]
        target = self._buffers.take(self._transfer, self._copies, source)
        self._copies += 1
        return target.copy_(source, non_blocking=kwargs.get("non_blocking", False))

    def _can_copy(
        self,
        source: Tensor,
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        pin_memory: bool | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format | None = None,
    ) -> bool:
        if device is None or device.type != self._buffers.device.type:
            return False
        if device.index is not None and device != self._buffers.device:
            return False
        if device.index is None and device.type == "cuda" and torch.cuda.current_device() != self._buffers.device.index:
            return False
        return (
            type(source) is Tensor
            and source.device.type == "cpu"
            and source.layout is torch.strided
            and layout in (None, torch.strided)
            and source.is_contiguous()
            and source.numel() > 0
            and dtype in (None, source.dtype)
            and not pin_memory
            and memory_format in (None, torch.preserve_format, torch.contiguous_format)
        )


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
