"""Registration of cross-stream memory use with the caching allocator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def record_stream(value: Any) -> None:
    """Record the current stream as a user of every device tensor in *value* (see ``torch.Tensor.record_stream``)."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    _record_stream_recursively(value)


class _SkipCpuRecordStream(TorchFunctionMode):
    """Context in which ``record_stream`` of CPU tensors has no effect."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.record_stream and not args[0].is_cuda:
            return None
        return func(*args, **(kwargs or {}))


def _record_stream_recursively(value: Any) -> None:
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            value.record_stream(torch.cuda.current_stream(value.device))
    elif hasattr(value, "record_stream"):
        stream = torch.cuda.current_stream()
        try:
            value.record_stream(stream)
        except NotImplementedError:  # of a CPU tensor in the object
            with _SkipCpuRecordStream():
                value.record_stream(stream)
    elif isinstance(value, Mapping):
        for entry in value.values():
            _record_stream_recursively(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            _record_stream_recursively(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _record_stream_recursively(getattr(value, field.name))
