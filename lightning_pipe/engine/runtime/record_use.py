"""Registration of cross-stream memory use with the caching allocator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


def record_use(value: Any) -> None:
    """Record the current stream as a user of every device tensor in *value*. CPU tensors are ignored.

    Otherwise the allocator could reuse the memory of a tensor from a side stream while the current stream still reads
    it (see ``torch.Tensor.record_stream``).

    Args:
        value: tensor, object with a ``record_stream(stream)`` method (such as TorchRec's), or a list, tuple, mapping or
            dataclass of these.
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
