"""Values of a batch on the host, where counts and checks read them without a wait for the device.

    loader's batch ──copy──► batch on the device ──► micro-batches of the stages
          └──────── recorded ────────┴──► the same values on the host ──► numbers of tokens, checks

Only a copy that was recorded, and not changed since, stands for its source. Other tensors on the device, such as those
that a transfer hook computes, are copied back, all with one wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pipe._compat.torch import tree_leaves, tree_map_only
from lightning_pipe.engine.runtime.devices import current_stream


class _Copy(NamedTuple):
    source: Tensor
    source_version: int
    result: Tensor
    result_version: int


class HostSourceTracker(TorchFunctionMode):
    """Records which tensor on a device is a copy of which tensor on the host, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[int, _Copy] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (Tensor.to, Tensor.cuda) and not _is_device_tensor(args[0]) and _is_device_tensor(result):
            source = args[0]
            # Tensors of inference mode do not count their changes.
            if source.dtype == result.dtype and not (source.is_inference() or result.is_inference()):
                self._copies[id(result)] = _Copy(source, source._version, result, result._version)
        return result

    def find_host_tensor(self, tensor: Tensor) -> Tensor | None:
        """Tensor on the host with the values of a tensor on a device; None if it is unknown, or one has changed."""
        copy = self._copies.get(id(tensor))
        if copy is None or (copy.source._version, tensor._version) != (copy.source_version, copy.result_version):
            return None
        return copy.source


def values_on_host(batch: Any, copies: HostSourceTracker) -> Any:
    """Return a batch with its tensors on the host, or the batch itself if none is on a device."""
    parts = [batch] if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else []
    values = [leaf for part in parts if isinstance(part, Mapping) for leaf in tree_leaves(list(part.values()))]
    device_values = {id(value): value for value in values if _is_device_tensor(value)}
    if not device_values:
        return batch
    host_copies = {key: copies.find_host_tensor(value) for key, value in device_values.items()}
    streams = {}
    for key, value in device_values.items():
        if host_copies[key] is None:
            streams[value.device] = current_stream(value.device)
            host_copies[key] = value.to("cpu", non_blocking=streams[value.device] is not None)
    for stream in streams.values():
        if stream is not None:
            stream.synchronize()
    on_host = [
        tree_map_only(Tensor, lambda value: host_copies.get(id(value), value), dict(part))
        if isinstance(part, Mapping)
        else part
        for part in parts
    ]
    return on_host[0] if isinstance(batch, Mapping) else on_host


def copy_to_device_of(like: Any, value: Any) -> Any:
    """Copy a tensor on the host to the device of another one, without a wait. Other values are returned unchanged."""
    if not isinstance(value, Tensor) or not isinstance(like, Tensor) or value.device == like.device:
        return value
    return (value.pin_memory() if like.is_cuda else value).to(like.device, non_blocking=True)


def _is_device_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"
