"""Refusals of optimizers on a rank that holds only some of the model's parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from lightning_pipe._compat.torch import looks_for_overflow
from lightning_pipe.engine.common.errors import SetupError

__all__ = ["refuse_fused"]


def refuse_fused(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that look for overflow by themselves, each on its own rank's gradients.

    Raises:
        SetupError: one does; to be raised only where losses are scaled.
    """
    for optimizer in optimizers:
        if looks_for_overflow(optimizer):
            raise SetupError(
                f"precision is '16-mixed' and {type(optimizer).__name__} is fused, so each rank would decide by itself"
                " whether gradients overflowed; make the optimiser with fused=False, or use 'bf16-mixed'"
            )
