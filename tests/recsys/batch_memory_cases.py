"""Batches whose move to the CPU copies, as a move to another device does; and what of them is alive."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.recsys.pipeline_cases import Case


def copied(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device, copy=True)
    if isinstance(value, KeyedJaggedTensor):
        made = copy.copy(value)
        made._jt_dict = None
        for name in ("_values", "_weights", "_lengths", "_offsets"):
            if (tensor := getattr(value, name)) is not None:
                setattr(made, name, copied(tensor, device))
        return made
    assert dataclasses.is_dataclass(value)
    assert not isinstance(value, type)
    parts = {field.name: copied(getattr(value, field.name), device) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **parts)


class Copying:
    """What a loader gives; on the device it is the batch itself.

    Args:
        batch: a dataclass.
        moved: called with what the device has.
    """

    def __init__(self, batch: Any, moved: Callable[[Any], None] | None = None) -> None:
        self.batch = batch
        self.moved = moved

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        made = copied(self.batch, device)
        if self.moved is not None:
            self.moved(made)
        return made


def copying(case: Case, moved: Callable[[Any], None] | None = None) -> Case:
    return dataclasses.replace(case, data=lambda count: [Copying(batch, moved) for batch in case.data(count)])


class LiveIds:
    """The ids of every batch that was moved, as long as anything holds them."""

    def __init__(self) -> None:
        self._batches: list[list[tuple[StorageWeakRef, int]]] = []

    def moved(self, batch: Any) -> None:
        tensors = [
            tensor
            for field in dataclasses.fields(batch)
            if isinstance(features := getattr(batch, field.name), KeyedJaggedTensor)
            for tensor in (features.values(), features.weights_or_none())
            if tensor is not None and tensor.numel()
        ]
        self._batches.append([(StorageWeakRef(one.untyped_storage()), one.nbytes) for one in tensors])

    def bytes_of(self, batch: int) -> int:
        """Those of one batch, by its number, that are alive."""
        return sum(size for storage, size in self._batches[batch] if not storage.expired())

    @property
    def batches(self) -> int:
        return len(self._batches)
