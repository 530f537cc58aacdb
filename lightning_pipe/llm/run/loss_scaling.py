"""Loss scaling in half precision for stages, whose loss and gradients are on different ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_pipe._compat.torch import get_found_inf_per_device


class LossScaling:
    """Scales the losses of a schedule, and lets all ranks agree whether gradients have overflowed.

    The initial factors of scalers are meant for a mean loss. A loss summed over tokens is larger, so it is also divided
    by a power of two near the number of tokens. All factors are powers of two, so scaling does not round.
    """

    def __init__(self, scaler: torch.amp.GradScaler, group: dist.ProcessGroup, device: torch.device) -> None:
        self._scaler = scaler
        self._group = group
        self._device = device
        self._divisor = 0.0

    def patch_scaler(self) -> None:
        """Replace the scaler's ``unscale_`` by a method that checks all ranks for overflow."""
        self._scaler.unscale_ = self._unscale  # type: ignore[method-assign]

    def get_step_loss_scale(self, tokens: int) -> float:
        """Return the factor for the losses of a batch with *tokens* tokens. All batches of a step share one factor."""
        if not self._divisor:
            self._divisor = 2.0 ** math.ceil(math.log2(max(tokens, 1)))
            self._scaler.scale(torch.zeros((), device=self._device))  # initializes the scale on the first call
        return float(self._scaler.get_scale()) / self._divisor

    def pop_gradient_factor(self) -> float:
        """End the step and return the factor by which gradients must be multiplied before the scaler unscales them."""
        divisor, self._divisor = self._divisor, 0.0
        return divisor or 1.0

    def _unscale(self, optimizer: Optimizer) -> None:
        """Unscale gradients, and skip the step on every rank if the gradients of any rank have overflowed."""
        torch.amp.GradScaler.unscale_(self._scaler, optimizer)
        flags: dict[Any, torch.Tensor] = get_found_inf_per_device(self._scaler, optimizer)
        worst = max((float(flag) for flag in flags.values()), default=0.0)
        overflow = torch.tensor(worst)
        dist.all_reduce(overflow, dist.ReduceOp.MAX, group=self._group)
        for flag in flags.values():
            flag.fill_(overflow.item())
        # The scaler refuses to step without a flag, so a rank without gradients gets one too.
        flags.setdefault(self._device, overflow.to(self._device))

    def close(self) -> None:
        """Restore the scaler's original method."""
        self._scaler.__dict__.pop("unscale_", None)
