"""Copy of a batch to the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from lightning_pipe.engine import InputError
from lightning_pipe.recsys.batches.pieces import children, with_parts

_PLAIN = (str, bytes, int, float, bool, complex, type(None))


def check_movable(batch: Any) -> None:
    """Refuse a batch with a part of a type that cannot be moved, which would otherwise silently stay where it is."""
    _check(batch, "batch")


def _check(value: Any, where: str) -> None:
    if isinstance(value, (torch.Tensor, *_PLAIN)) or callable(getattr(value, "to", None)):
        return
    if isinstance(value, Mapping):
        for key, entry in value.items():
            _check(entry, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            _check(entry, f"{where}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _check(getattr(value, field.name), f"{where}.{field.name}")
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
    return with_parts(value, [_move(part, device) for _, part in children(value)])
