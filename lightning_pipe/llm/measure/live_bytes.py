"""Counts the bytes of tensors that are created during a step.

The memory of the process is a poor measure of this: allocators keep memory that no tensor uses.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from lightning_pipe._compat.torch import TorchDispatchMode, storage_key, tree_leaves


class LiveBytes(TorchDispatchMode):
    """While entered, counts the bytes of created tensors until they are freed.

    It counts each storage once, regardless of its views, if it is an output of an operation and not one of its inputs.
    So it excludes parameters and buffers that existed before, and temporary memory within an operation.

    Run one step before: tensors that are created only once, such as PyTorch's receive buffers, would be counted.

    Attributes:
        current: current number of bytes.
        peak: maximum number of bytes at the end of any operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.current = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        input_keys = {storage_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and (key := storage_key(leaf)) not in input_keys and key not in self._sizes:
                self._add_storage_bytes(leaf, key)
        self.peak = max(self.peak, self.current)
        return output

    def _add_storage_bytes(self, tensor: Tensor, key: int) -> None:
        storage = tensor.untyped_storage()
        self._sizes[key] = storage.nbytes()
        self.current += self._sizes[key]
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.current -= self._sizes.pop(key)
