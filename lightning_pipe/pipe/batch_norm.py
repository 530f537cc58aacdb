"""Batch normalisation whose running statistics are those of the whole mini-batch, not of its micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_pipe.engine import SetupError
from lightning_pipe.pipe.position import position

__all__ = ["DeferredBatchNorm", "defer_batch_norm"]


class DeferredBatchNorm(_BatchNorm):
    """Normalises each micro-batch by its own mean and variance, and moves the running ones once a mini-batch.

    The mean and the unbiased variance over all rows of the mini-batch are gathered from micro-batch to micro-batch
    (Chan, Golub and LeVeque, 1979), in double precision, and put into the running statistics behind the last one. The
    batch counts once. Outside of a pipe it is batch normalisation as PyTorch has it. State dict and arguments are those
    of ``nn.BatchNorm1d`` and its like.
    """

    running_mean: Tensor | None
    running_var: Tensor | None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._count = 0
        self._mean: Tensor | None = None
        self._squares: Tensor | None = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of 2 dimensions or more, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        where = position()
        if where is None or not self.training or self.running_mean is None:
            return super().forward(input)
        self._check_input_dim(input)
        if not where.recomputing:
            if where.micro_batch == 0:
                self._count, self._mean, self._squares = 0, None, None  # what an error may have left, too
            self._add(input.detach())
            if where.micro_batch == where.micro_batches - 1:
                self._move()
        return functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    def _add(self, input: Tensor) -> None:
        """Take a micro-batch into the mean and the sum of squared differences from it."""
        dims = [dim for dim in range(input.dim()) if dim != 1]
        count = input.numel() // input.shape[1]
        variance, mean = torch.var_mean(input.double(), dims, correction=0)
        if self._mean is None or self._squares is None:
            self._count, self._mean, self._squares = count, mean, variance * count
            return
        total = self._count + count
        apart = mean - self._mean
        self._squares = self._squares + variance * count + apart.square() * (self._count * count / total)
        self._mean = self._mean + apart * (count / total)
        self._count = total

    def _move(self) -> None:
        assert self._mean is not None and self._squares is not None
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        # As PyTorch's: without a momentum a mean of all batches.
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        variance = self._squares / max(1, self._count - 1)
        with torch.no_grad():
            self.running_mean.lerp_(self._mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)
        self._mean = self._squares = None


def defer_batch_norm(module: nn.Module) -> nn.Module:
    """*module* with :class:`DeferredBatchNorm` in the place of every batch normalisation, on the same tensors.

    Raises:
        SetupError: a ``SyncBatchNorm``, whose statistics are of several processes.
    """
    return _deferred(module, {})


def _deferred(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in known:
        return known[module]
    known[module] = module
    if isinstance(module, nn.SyncBatchNorm):
        raise SetupError("a SyncBatchNorm is in the module; a pipe is one process: use nn.BatchNorm1d and its like")
    if isinstance(module, _BatchNorm) and not isinstance(module, DeferredBatchNorm) and module.track_running_stats:
        known[module] = _defer(module)
        return known[module]
    for name, child in list(module._modules.items()):
        if child is not None:
            module._modules[name] = _deferred(child, known)
    return module


def _defer(module: _BatchNorm) -> DeferredBatchNorm:
    deferred = DeferredBatchNorm(module.num_features, module.eps, module.momentum, module.affine)
    deferred._parameters = module._parameters
    deferred._buffers = module._buffers
    deferred._forward_hooks = module._forward_hooks
    deferred._forward_pre_hooks = module._forward_pre_hooks
    deferred.training = module.training
    return deferred
