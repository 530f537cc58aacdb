"""Copies between the devices of partitions, on separate streams that overlap with compute and other copies."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_pipe._compat.torch import pytree


@dataclass(frozen=True)
class PendingCopy:
    """Values on the receiver's device, ready when the events have completed."""

    value: Any
    events: tuple[Any, ...] = field(default=())


class Copier:
    """Copies between the partitions' devices.

    Synchronization on a GPU, as in torchgpipe::

        compute of the source   ... makes x │                         (1) the copy waits for what made x
        copy streams                        │ (1) y = x.to(target) │  (2) the receiver waits for the copy
        compute of the target                                      │ (2) uses y ...

    x may be freed once (1) is submitted, and y is allocated on the copy stream. Both are therefore recorded on the
    stream that uses them (``record_stream``). As in torchgpipe, each partition has a copy stream for each micro-batch,
    so that the copy of a micro-batch does not wait for that of another.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._streams: dict[tuple[int, int], Any] = {}  # by partition and micro-batch
        self._streams_lock = threading.Lock()

    def send(self, value: Any, source: int, target: int, chunk: int) -> PendingCopy:
        """Start a copy of *value*, which the calling thread's streams have computed or will compute."""
        source_device, target_device = self._devices[source], self._devices[target]
        if source_device == target_device:
            return PendingCopy(value)
        leaves, spec = pytree.tree_flatten(value)
        streams = [
            self._stream(partition, chunk) for partition in (source, target) if self._is_gpu_partition(partition)
        ]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(stream.device))  # (1)
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            moved = [leaf.to(target_device, non_blocking=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            events = [stream.record_event() for stream in streams]
        if self._is_gpu_partition(source):
            for leaf in leaves:
                if isinstance(leaf, Tensor) and leaf.is_cuda:
                    leaf.record_stream(streams[0])
        return PendingCopy(pytree.tree_unflatten(moved, spec), tuple(events))

    def receive(self, sent: PendingCopy, partition: int) -> Any:
        """Return the value that was sent to *partition*, ready for the calling thread's current stream there."""
        device = self._devices[partition]
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            for event in sent.events:
                stream.wait_event(event)  # (2)
            if sent.events:
                for leaf in pytree.tree_leaves(sent.value):
                    if isinstance(leaf, Tensor) and leaf.is_cuda:
                        leaf.record_stream(stream)
        else:
            for event in sent.events:
                event.synchronize()  # the host must wait for a copy to host memory
        return sent.value

    def _is_gpu_partition(self, partition: int) -> bool:
        return self._devices[partition].type == "cuda"

    def _stream(self, partition: int, chunk: int) -> Any:
        with self._streams_lock:  # threads of neighboring partitions use the same streams
            stream = self._streams.get((partition, chunk))
            if stream is None:
                stream = self._streams[partition, chunk] = torch.cuda.Stream(self._devices[partition])
            return stream
