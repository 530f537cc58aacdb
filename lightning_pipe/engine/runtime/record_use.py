"""Telling the caching allocator that a stream uses memory which another stream allocated.

Tested in ``tests/recsys/batches/test_device_buffers.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["note_stream", "record_use", "streams_of_use"]

_STREAMS: set[torch.Stream] = set()  # PyTorch makes new ones out of a fixed number, so these are few


def streams_of_use(device: torch.device) -> list[Any]:
    """The device's streams that values were recorded to be used on so far, its default one and the current one."""
    always = {torch.cuda.default_stream(device), torch.cuda.current_stream(device)}
    return list(always.union(stream for stream in tuple(_STREAMS) if stream.device == device))


def note_stream(stream: torch.Stream) -> None:
    """*stream* uses values of batches; what :func:`record_use` does by itself."""
    _STREAMS.add(stream)


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
            stream = torch.cuda.current_stream(value.device)
            note_stream(stream)
            value.record_stream(stream)
    elif hasattr(value, "record_stream"):
        stream = torch.cuda.current_stream()
        note_stream(stream)
        value.record_stream(stream)
    elif isinstance(value, Mapping):
        for entry in value.values():
            _record(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _record(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _record(getattr(value, field.name))
