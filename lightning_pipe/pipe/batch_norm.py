"""Batch normalization with running statistics of the whole mini-batch instead of its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_pipe._compat.torch import BatchNorm
from lightning_pipe.engine import SetupError
from lightning_pipe.pipe.position import MicroBatchPosition, get_micro_batch_position


class DeferredBatchNorm(BatchNorm):
    """Normalizes each micro-batch by its own mean and variance, and updates running statistics once per mini-batch.

    The mean and the unbiased variance over all rows of the mini-batch are accumulated over its micro-batches (Chan,
    Golub and LeVeque, 1979), in double precision. After the last micro-batch they update the running statistics, and
    ``num_batches_tracked`` is incremented by one. Outside of a pipe, the layer behaves like PyTorch's batch
    normalization. State dict and arguments equal those of ``nn.BatchNorm1d``, ``nn.BatchNorm2d`` and
    ``nn.BatchNorm3d``. Unlike these, it accepts inputs with any number of dimensions from two, (rows, channels, ...).

    Raises:
        ValueError: In training within a pipe, if an input has fewer than two dimensions.
    """

    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._last_forward: tuple[object, int] | None = None  # mini-batch and micro-batch of the last forward
        self._call = 0  # number of earlier forwards of that micro-batch
        self._gathered: list[_Moments] = []  # moments of the mini-batch, for each of these forwards

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of 2 dimensions or more, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        where = get_micro_batch_position()
        if where is None or not self.training or self.running_mean is None:
            return super().forward(input)
        self._check_input_dim(input)
        if not where.recomputing:
            self._accumulate(input.detach(), where)
        return functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    def _accumulate(self, input: Tensor, micro_batch_position: MicroBatchPosition) -> None:
        """Add a micro-batch to the moments of its mini-batch, and the last one to the running statistics."""
        if self._last_forward == (micro_batch_position.mini_batch, micro_batch_position.micro_batch):
            self._call += 1  # the layer appears several times in the Sequential
        else:
            if self._last_forward is None or self._last_forward[0] is not micro_batch_position.mini_batch:
                self._gathered = []  # discards moments of a mini-batch that ended with an error
            self._last_forward, self._call = (micro_batch_position.mini_batch, micro_batch_position.micro_batch), 0
        if self._call == len(self._gathered):
            self._gathered.append(_Moments())
        moments = self._gathered[self._call]
        moments.add(input)
        if micro_batch_position.micro_batch == micro_batch_position.micro_batches - 1:
            self._update_running_stats(moments)

    def _update_running_stats(self, moments: _Moments) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # As in PyTorch: without a momentum, the mean of all batches.
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        variance = moments.squares / max(1, moments.count - 1)
        with torch.no_grad():
            self.running_mean.lerp_(moments.mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


class _Moments:
    """Mean of each channel and sum of squared differences from it, accumulated over micro-batches."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.squares = torch.empty(())

    def add(self, input: Tensor) -> None:
        """Add a micro-batch."""
        dims = [dim for dim in range(input.dim()) if dim != 1]
        count = input.numel() // input.shape[1]
        variance, mean = torch.var_mean(input.double(), dims, correction=0)
        if not self.count:
            self.count, self.mean, self.squares = count, mean, variance * count
            return
        total = self.count + count
        delta = mean - self.mean
        self.squares = self.squares + variance * count + delta.square() * (self.count * count / total)
        self.mean = self.mean + delta * (count / total)
        self.count = total


def defer_batch_norm(module: nn.Module, replaced: dict[nn.Module, nn.Module] | None = None) -> nn.Module:
    """Replace every batch normalization of *module* by a :class:`DeferredBatchNorm` on the same tensors."""
    replacements: dict[nn.Module, nn.Module] = {}
    changed = _convert_module(module, replacements)
    if replaced is not None:
        replaced.update({deferred: original for original, deferred in replacements.items() if deferred is not original})
    return changed


def undefer_batch_norm(module: nn.Module, layers: Mapping[nn.Module, nn.Module]) -> None:
    """Restore the batch normalizations that :func:`defer_batch_norm` has replaced."""
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and child in layers:
                original = layers[child]
                original.training = child.training
                parent._modules[name] = original


def _convert_module(module: nn.Module, replacements: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in replacements:
        return replacements[module]
    replacements[module] = module
    if isinstance(module, BatchNorm) and not isinstance(module, DeferredBatchNorm) and module.track_running_stats:
        if type(module).forward is not BatchNorm.forward:
            raise SetupError(
                f"a {type(module).__name__} overrides forward, which a deferred batch normalization would not run. Use"
                " nn.BatchNorm1d, nn.BatchNorm2d or nn.BatchNorm3d, or pass deferred_batch_norm=False"
            )
        replacements[module] = _make_deferred_batch_norm(module)
        return replacements[module]
    for name, child in list(module._modules.items()):
        if child is not None:
            module._modules[name] = _convert_module(child, replacements)
    return module


def _make_deferred_batch_norm(module: BatchNorm) -> DeferredBatchNorm:
    deferred = DeferredBatchNorm(module.num_features, module.eps, module.momentum, module.affine)
    deferred._parameters = module._parameters
    deferred._buffers = module._buffers
    deferred.__dict__.update({name: hooks for name, hooks in module.__dict__.items() if "hook" in name})
    deferred.training = module.training
    return deferred
