"""Copy of a batch to the device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch

from lightning_pipe.engine import InputError

_PLAIN = (str, bytes, int, float, bool, complex, type(None))


def move_tensor_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on *device*, without waiting for the copy from the host."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def check_movable(batch: Any) -> None:
    """Refuse a batch with a part of a type that cannot be moved, which would otherwise silently stay where it is."""
    _check_batch_movable_to_device(batch, "batch")


def _check_batch_movable_to_device(value: Any, where: str) -> None:
    if isinstance(value, (torch.Tensor, *_PLAIN)) or callable(getattr(value, "to", None)):
        return
    if isinstance(value, Mapping):
        for key, entry in value.items():
            _check_batch_movable_to_device(entry, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            _check_batch_movable_to_device(entry, f"{where}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _check_batch_movable_to_device(getattr(value, field.name), f"{where}.{field.name}")
    else:
        raise InputError(
            f"{where} is of type {type(value).__qualname__}, which cannot be moved to a device; expected a tensor, an"
            " object with a to(device, non_blocking) method, or a list, tuple, dict or dataclass of these. Give the"
            " class a to method, or override transfer_batch_to_device"
        )


def move_batch(batch: Any, device: torch.device) -> Any:
    """Return the batch on *device*; the copy is asynchronous if the batch is in pinned memory."""
    check_movable(batch)
    return _move(batch, device)


def _move(value: Any, device: torch.device) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if callable(getattr(value, "to", None)):
        return value.to(device=device, non_blocking=True)
    if isinstance(value, MutableMapping):
        moved_mapping = copy.copy(value)  # keeps other attributes, such as the factory of a defaultdict
        for key, entry in value.items():
            moved_mapping[key] = _move(entry, device)
        return moved_mapping
    if isinstance(value, Mapping):
        return type(value)({key: _move(entry, device) for key, entry in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_move(entry, device) for entry in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_move(entry, device) for entry in value)
    moved = copy.copy(value)  # not constructed: __post_init__ has run, and some fields may not be arguments
    for field in dataclasses.fields(value):
        object.__setattr__(moved, field.name, _move(getattr(value, field.name), device))
    return moved
