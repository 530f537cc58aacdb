"""Half precision with a loss scaler, where the loss and the gradients are on different ranks.

Tested in ``tests/scenarios/language_models/test_llm_half_precision.py``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch.optim import Optimizer

from lightning_pipe._compat.torch import overflow_flags

__all__ = ["LossScaling"]


class LossScaling:
    """The factor of a schedule's losses, and one verdict of all ranks on whether gradients have overflowed.

    A loss summed over tokens is larger than the mean that scalers start out for, so it is divided by a power of two,
    near the number of tokens, as well. All factors are powers of two, which round nothing.

    Args:
        scaler: of the precision plugin; its ``unscale_`` is replaced from :meth:`install` to :meth:`close`.
        group: of all ranks that step together, on the CPU.
        device: of this rank.
    """

    def __init__(self, scaler: torch.amp.GradScaler, group: dist.ProcessGroup, device: torch.device) -> None:
        self._scaler = scaler
        self._group = group
        self._device = device
        self._divisor = 0.0

    @classmethod
    def of(cls, precision: Precision, group: dist.ProcessGroup, device: torch.device) -> LossScaling | None:
        """For a plugin that has a scaler."""
        scaler = precision.scaler if isinstance(precision, MixedPrecision) else None
        return None if scaler is None else cls(scaler, group, device)

    def install(self) -> None:
        """Let the scaler ask all ranks."""
        self._scaler.unscale_ = self._unscale  # type: ignore[method-assign]

    def begin(self, tokens: int) -> float:
        """What to multiply the losses of a batch of so many tokens with. Batches of one step have one factor."""
        if not self._divisor:
            self._divisor = 2.0 ** math.ceil(math.log2(max(tokens, 1)))
            self._scaler.scale(torch.zeros((), device=self._device))  # makes the factor, the first time
        return float(self._scaler.get_scale()) / self._divisor

    def end(self) -> float:
        """What gradients are to be multiplied with before the scaler unscales them."""
        divisor, self._divisor = self._divisor, 0.0
        return divisor or 1.0

    def _unscale(self, optimizer: Optimizer) -> None:
        """Unscale, and skip the step on every rank where gradients of any have overflowed."""
        torch.amp.GradScaler.unscale_(self._scaler, optimizer)
        found: dict[Any, torch.Tensor] = overflow_flags(self._scaler, optimizer)
        worst = max((float(flag) for flag in found.values()), default=0.0)
        overflow = torch.tensor(worst)
        dist.all_reduce(overflow, dist.ReduceOp.MAX, group=self._group)
        for flag in found.values():
            flag.fill_(overflow.item())
        # A rank without a gradient would not be allowed to step.
        found.setdefault(self._device, overflow.to(self._device))

    def close(self) -> None:
        """Give the scaler its own method back."""
        self._scaler.__dict__.pop("unscale_", None)
