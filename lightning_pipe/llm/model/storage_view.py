"""Tensors as views of numbered storages.

Tested in ``tests/llm/model/test_deferred.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["View", "view_of"]


@dataclass(frozen=True, slots=True)
class View:
    """Layout of a tensor in its storage. Strides and offset count elements of `dtype`, as in PyTorch."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor that has this layout in `storage`."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conjugated else tensor
        return torch._neg_view(tensor) if self.negated else tensor

    def layout(self) -> tuple[object, ...]:
        """Return the parts that determine the position of each element. Strides of dimensions of size 1 do not."""
        empty = 0 in self.size
        strides = () if empty else tuple(s for n, s in zip(self.size, self.stride, strict=True) if n > 1)
        return self.dtype, self.size, strides, self.offset, self.conjugated, self.negated


def view_of(tensor: torch.Tensor, storage: int) -> View:
    """Return the layout of `tensor` in its storage, which has the number `storage`."""
    size, stride, offset = tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())
    return View(storage, tensor.dtype, size, stride, offset, tensor.is_conj(), tensor.is_neg())
