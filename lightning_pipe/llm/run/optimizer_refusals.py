"""Refusals of optimizers on a rank that holds only some of the model's parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from lightning_pipe._compat.torch import looks_for_overflow
from lightning_pipe.engine.common.errors import SetupError

__all__ = ["refuse_fused"]


def refuse_fused(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that check for overflow on their own rank's gradients only. Call it if losses are scaled.

    Raises:
        SetupError: such an optimizer.
    """
    for optimizer in optimizers:
        if looks_for_overflow(optimizer):
            raise SetupError(
                f"precision is '16-mixed' and {type(optimizer).__name__} is fused, so each rank would decide on its own"
                " whether gradients overflowed. Construct the optimiser with fused=False, or use 'bf16-mixed'"
            )
