"""Counts the bytes of tensors that a rank holds during a step, by the forward that created them.

The memory of the process is a poor measure of this: allocators keep memory that no tensor uses.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_pipe._compat.torch import TorchDispatchMode, storage_key, tree_leaves

__all__ = ["LiveBytes"]

Forward = tuple[int, int]


class LiveBytes(TorchDispatchMode):
    """While entered, counts the bytes of created tensors until they are freed.

    It counts each storage once, regardless of its views, if it is an output of an operation and not one of its inputs.
    So it excludes parameters and buffers that existed before, and temporary memory within an operation. A storage
    belongs to the forward that created it: those that remain after a forward are its activations, kept for backward,
    and its output.

    Run one step before: tensors that are created only once, such as PyTorch's receive buffers, would be counted.

    Args:
        stages: this rank's modules, by stage, as the pipeline calls them. Each call is the forward of one micro-batch,
            and calls are in the order of micro-batches.

    Attributes:
        now: current number of bytes.
        peak: maximum number of bytes at the end of any operation.
        of_forwards: current bytes created in each forward, by stage and micro-batch; forwards without remaining bytes
            are omitted.
        after_forwards: value of ``of_forwards`` at the end of each forward, in order.
    """

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self._stages = dict(stages)
        self._known: dict[int, tuple[int, Forward | None]] = {}
        self._counts = dict.fromkeys(self._stages, 0)
        self._running: Forward | None = None
        self._hooks: list[RemovableHandle] = []
        self.now = 0
        self.peak = 0
        self.of_forwards: dict[Forward, int] = {}
        self.after_forwards: list[dict[Forward, int]] = []

    def __enter__(self) -> LiveBytes:
        for index, stage in self._stages.items():
            self._hooks.append(stage.register_forward_pre_hook(lambda *_, index=index: self._begin(index)))
            self._hooks.append(stage.register_forward_hook(lambda *_: self._end()))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        while self._hooks:
            self._hooks.pop().remove()

    def _begin(self, stage: int) -> None:
        self._running = stage, self._counts[stage]
        self._counts[stage] += 1

    def _end(self) -> None:
        self._running = None
        self.after_forwards.append(dict(self.of_forwards))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        taken = {storage_key(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        for one in tree_leaves(output):
            if isinstance(one, Tensor) and (key := storage_key(one)) not in taken and key not in self._known:
                self._count(one, key)
        self.peak = max(self.peak, self.now)
        return output

    def _count(self, tensor: Tensor, key: int) -> None:
        storage = tensor.untyped_storage()
        self._known[key] = storage.nbytes(), self._running
        self._add(*self._known[key])
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        size, forward = self._known.pop(key)
        self._add(-size, forward)

    def _add(self, size: int, forward: Forward | None) -> None:
        self.now += size
        if forward is not None:
            left = self.of_forwards.pop(forward, 0) + size
            if left:
                self.of_forwards[forward] = left
