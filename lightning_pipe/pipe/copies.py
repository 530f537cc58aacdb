"""Copies of values between the devices of partitions, on separate streams that overlap with compute on both devices.

Tested in ``tests/pipe/test_scheduler.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_pipe._compat.torch import pytree

__all__ = ["Copier", "Sent"]


@dataclass(frozen=True)
class Sent:
    """Values on the receiver's device, ready when the events have completed.

    Args:
        value: any nesting of values; only tensors are copied.
        events: events that the receiver's stream must wait for (default none).
    """

    value: Any
    events: tuple[Any, ...] = field(default=())


class Copier:
    """Copies between the partitions' devices.

    Synchronisation on a GPU, as in torchgpipe::

        compute of the source   ... makes x │                         (1) the copy waits for what made x
        copy streams                        │ (1) y = x.to(target) │  (2) the receiver waits for the copy
        compute of the target                                      │ (2) uses y ...

    x may be freed once (1) is submitted, and y is allocated on the copy stream. Both are therefore recorded on the
    stream that uses them (``record_stream``).

    Args:
        devices: device of each partition.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._streams: dict[torch.device, Any] = {
            device: torch.cuda.Stream(device) for device in dict.fromkeys(devices) if device.type == "cuda"
        }

    def send(self, value: Any, source: int, target: int) -> Sent:
        """Start a copy of *value*, which the calling thread's streams have computed or will compute.

        Args:
            value: any nesting of tensors.
            source: index of the partition that has the value.
            target: index of the partition that needs the value.

        Returns:
            the copied value and the events that the receiver must wait for.
        """
        here, there = self._devices[source], self._devices[target]
        if here == there:
            return Sent(value)
        leaves, spec = pytree.tree_flatten(value)
        ends = [self._streams[device] for device in (here, there) if device in self._streams]
        for stream in ends:
            stream.wait_stream(torch.cuda.current_stream(stream.device))  # (1)
        with ExitStack() as stack:
            for stream in ends:
                stack.enter_context(torch.cuda.stream(stream))
            moved = [leaf.to(there, non_blocking=True) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            events = []
            for stream in ends:
                event = torch.cuda.Event()
                event.record(stream)
                events.append(event)
        if here in self._streams:
            for leaf in leaves:
                if isinstance(leaf, Tensor) and leaf.is_cuda:
                    leaf.record_stream(self._streams[here])
        return Sent(pytree.tree_unflatten(moved, spec), tuple(events))

    def receive(self, sent: Sent, partition: int) -> Any:
        """Return the value that was sent to *partition*, ready for the calling thread's current stream there."""
        there = self._devices[partition]
        if there.type == "cuda":
            stream = torch.cuda.current_stream(there)
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
