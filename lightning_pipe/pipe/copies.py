"""Values on their way from one partition's device to another's: on streams of their own, beside both's compute.

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
    """Values on another device, which are there behind some events.

    Args:
        value: any nesting; what is no tensor is as it was.
        events: that the receiver's stream has to wait for.
    """

    value: Any
    events: tuple[Any, ...] = field(default=())


class Copier:
    """Copies between the partitions' devices.

    The order of things on a GPU, as torchgpipe has it::

        compute of the source   ... makes x │                         (1) the copy waits for what made x
        copy streams                        │ (1) y = x.to(target) │  (2) the receiver waits for the copy
        compute of the target                                      │ (2) uses y ...

    x may be freed once (1) is submitted, and y lives in the copy stream's memory: both are recorded where they are
    used.

    Args:
        devices: of each partition.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = list(devices)
        self._streams: dict[torch.device, Any] = {
            device: torch.cuda.Stream(device) for device in dict.fromkeys(devices) if device.type == "cuda"
        }

    def send(self, value: Any, source: int, target: int) -> Sent:
        """Begin to copy *value*, which the calling thread's streams have made or will make.

        Args:
            value: any nesting of tensors.
            source: the partition that has it.
            target: the one that needs it.
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
        """What was sent to *partition*, for the calling thread's current stream there."""
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
                event.synchronize()  # a copy to the host is there when the host has waited
        return sent.value
