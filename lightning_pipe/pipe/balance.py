"""Balancing of layers over partitions: contiguous shares whose largest cost is as small as possible.

Layers are measured here and not with ``llm/measure``: items of an ``nn.Sequential`` pass values of any structure and
may have skips, but ``llm/measure`` runs the stages of a model with one tensor between them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe._compat.torch import pytree
from lightning_pipe.engine import PlanError
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.engine.planning.contiguous_partition import partition_contiguously
from lightning_pipe.pipe.scatter import to_device
from lightning_pipe.pipe.skip import SkipKey, Skips, set_current_skips


def balance_by_costs(costs: Sequence[float], partitions: int) -> list[int]:
    """Split a list of costs into contiguous shares whose largest sum is as small as possible."""
    check_whole_number("partitions", partitions, 1, error=PlanError)
    if len(costs) < partitions:
        raise PlanError(
            f"{len(costs)} layers cannot be split into {partitions} partitions; expected at least one layer for each"
            " partition. Use fewer devices, or split layers into smaller ones"
        )
    before = [0.0, *accumulate(costs)]
    # Among equally good splits, take the latest: earlier partitions hold more micro-batches, the last one the loss.
    return partition_contiguously(len(costs), partitions, lambda _, first, end: before[end] - before[first])


def balance_by_parameters(module: nn.Sequential, partitions: int) -> list[int]:
    """Balance partitions by the number of parameters of each layer.

    Args:
        module: Sequential whose layers are balanced.
        partitions: number of partitions.

    Returns:
        number of layers of each partition.
    """
    return balance_by_costs([sum(p.numel() for p in layer.parameters()) for layer in module], partitions)


def balance_by_time(
    module: nn.Sequential, partitions: int, sample: Any, *, repeats: int = 5, device: torch.device | str | None = None
) -> list[int]:
    """Balance partitions by the measured time of each layer, forward and backward.

    Args:
        module: Sequential whose layers are measured in their current mode. Buffers and random generators are restored;
            gradients of parameters are not changed.
        partitions: number of partitions.
        sample: input of the first layer: a micro-batch.
        repeats: number of measurements of each layer, of which the median is used (default 5).
        device: device to which each layer is moved while it is measured (default: its current device).

    Returns:
        number of layers of each partition.
    """
    return balance_by_costs([seconds for seconds, _ in _measure_layers(module, sample, repeats, device)], partitions)


def balance_by_memory(
    module: nn.Sequential,
    partitions: int,
    sample: Any,
    *,
    chunks: int = 1,
    parameter_scale: float = 4.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Balance partitions by the memory that each layer takes in training.

    Args:
        module: see :func:`balance_by_time`, also for *partitions*, *sample* and *device*.
        chunks: number of micro-batches whose activations are held at the same time (default 1).
        parameter_scale: bytes per byte of parameters, including the gradient and the optimizer states (default 4, for
            Adam). Use 3 for SGD with momentum and 2 for SGD.

    Returns:
        number of layers of each partition.
    """
    costs = []
    for layer, (_, activations) in zip(module, _measure_layers(module, sample, 1, device), strict=True):
        parameters = sum(p.numel() * p.element_size() for p in layer.parameters())
        costs.append(parameters * parameter_scale + activations * chunks)
    return balance_by_costs(costs, partitions)


def _measure_layers(
    module: nn.Sequential, sample: Any, repeats: int, device: torch.device | str | None
) -> list[tuple[float, int]]:
    """Measure each layer: seconds of forward and backward, and bytes that are saved for backward."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = sorted({p.device.index for p in module.parameters() if p.device.type == "cuda"})
    if device is not None and torch.device(device).type == "cuda":
        devices = sorted({*devices, torch.device(device).index or 0})
    try:
        with torch.random.fork_rng(devices), torch.enable_grad(), set_current_skips(_ReusableSkips()):
            measurements, value = [], sample
            for layer in module:
                with _move_layer_temporarily(layer, device):
                    value = value if device is None else to_device(value, device)
                    seconds, saved_bytes, value = _measure_layer(layer, value, repeats)
                measurements.append((seconds, saved_bytes))
            return measurements
    finally:
        with torch.no_grad():
            for buffer, original in buffers:
                buffer.copy_(original)


def _measure_layer(layer: nn.Module, value: Any, repeats: int) -> tuple[float, int, Any]:
    parameters: list[Tensor] = [p for p in layer.parameters() if p.requires_grad]
    parameter_pointers = {p.data_ptr() for p in layer.parameters()}
    times = []
    for _ in range(repeats):
        bytes_by_storage: dict[int, int] = {}

        def record_saved_bytes(tensor: Tensor, bytes_by_storage: dict[int, int] = bytes_by_storage) -> Tensor:
            storage = tensor.untyped_storage()
            if tensor.data_ptr() not in parameter_pointers:
                bytes_by_storage[storage.data_ptr()] = storage.nbytes()
            return tensor

        inputs = _detach_and_require_grad(value)
        with torch.autograd.graph.saved_tensors_hooks(record_saved_bytes, lambda tensor: tensor):
            _synchronize_gpus_of_tensors(inputs)
            begin = time.perf_counter()
            # Copies, which layers may change in place.
            output = layer(pytree.tree_map_only(Tensor, Tensor.clone, inputs))
        ends = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        starts = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if ends and starts + parameters:
            torch.autograd.grad(ends, starts + parameters, [torch.ones_like(end) for end in ends], allow_unused=True)
        _synchronize_gpus_of_tensors(output)
        times.append(time.perf_counter() - begin)
    return statistics.median(times), sum(bytes_by_storage.values()), _detach_and_require_grad(output)


@contextmanager
def _move_layer_temporarily(layer: nn.Module, device: torch.device | str | None) -> Iterator[None]:
    """Context in which a layer is on *device*."""
    tensors = [*layer.parameters(), *layer.buffers()]
    if device is None or not tensors:
        yield
        return
    before = tensors[0].device
    try:
        layer.to(device)
        yield
    finally:
        layer.to(before)


class _ReusableSkips(Skips):
    """Skips that can be stashed and popped several times, for repeated measurements."""

    def stash(self, key: SkipKey, value: Any) -> None:
        self.values[key] = _detach_and_require_grad(value)

    def pop(self, key: SkipKey) -> Any:
        self.values[key] = value = super().pop(key)
        return value


def _detach_and_require_grad(value: Any) -> Any:
    """Detach all tensors, and let them require gradients if their dtype allows one."""
    return pytree.tree_map_only(
        Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point() or tensor.is_complex()), value
    )


def _synchronize_gpus_of_tensors(value: Any) -> None:
    """Synchronize the GPUs of the tensors."""
    for device in {leaf.device for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
