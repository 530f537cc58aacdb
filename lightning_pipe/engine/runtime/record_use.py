"""Telling the caching allocator that a stream uses memory which another stream allocated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["record_use"]


def record_use(value: Any) -> None:
    """Record the current stream as a user of every device tensor in *value*; nothing for CPU tensors.

    Without it a tensor made on a side stream can have its memory given away while the current stream still reads it
    (see ``torch.Tensor.record_stream``).

    Args:
        value: a tensor, an object with a ``record_stream(stream)`` of its own (TorchRec's, for example), or a
            collection, mapping or dataclass of such.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    _record(value)


def _record(value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            value.record_stream(torch.cuda.current_stream(value.device))
    elif hasattr(value, "record_stream"):
        value.record_stream(torch.cuda.current_stream())
    elif isinstance(value, Mapping):
        for entry in value.values():
            _record(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _record(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _record(getattr(value, field.name))
