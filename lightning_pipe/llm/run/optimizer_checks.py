"""Refusals of optimizers on a rank that holds only some of the model's parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Adafactor, Optimizer

from lightning_pipe._compat.torch import supports_amp_scaling
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.parallel.parallel_dims import ParallelDims


def check_not_fused(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that check for overflow on their own rank's gradients only. Call it if losses are scaled."""
    for optimizer in optimizers:
        if supports_amp_scaling(optimizer):
            raise SetupError(
                f"precision is '16-mixed' and {type(optimizer).__name__} is fused, so each rank would decide on its own"
                " whether gradients overflowed. Construct the optimizer with fused=False, or use 'bf16-mixed'"
            )


def check_optimizers_for_sharding(optimizers: Sequence[Optimizer], sizes: ParallelDims) -> None:
    """Refuse optimizers whose step PyTorch cannot compute for sharded parameters.

    Muon is not refused: its products of matrices are those of whole matrices.
    """
    refused = next((type(optimizer).__name__ for optimizer in optimizers if isinstance(optimizer, Adafactor)), None)
    shared = [f"parallel.{name}={size}" for name in ("dp_shard", "tp", "ep") if (size := getattr(sizes, name)) > 1]
    if refused is not None and shared:
        raise SetupError(
            f"{refused} needs whole rows and columns of matrices, which PyTorch does not compute for sharded"
            f" parameters, but {', '.join(shared)}; expected 1. Use AdamW or Muon, or parallel.dp_replicate, which"
            " keeps parameters whole"
        )
