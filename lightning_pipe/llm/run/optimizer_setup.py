"""The user's ``configure_optimizers`` on a rank that holds only some of the model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_pipe.engine.plans.errors import SetupError

__all__ = ["empty_optimizers_allowed", "refuse_fused"]

_PLACEHOLDER = "lightning_pipe_placeholder"


@contextmanager
def empty_optimizers_allowed(
    module: nn.Module, optimizers: Callable[[], Sequence[Optimizer]]
) -> Generator[None, None, None]:
    """Let optimizers be made of no parameters, as they are on a rank whose stages are all frozen; PyTorch refuses.

    In the body, modules without a trainable parameter have an empty one, which is taken out of the optimizers after it.

    Args:
        module: whose parameters optimizers are made of.
        optimizers: returns the optimizers that were made in the body.
    """
    holders = [one for one in module.modules() if not any(each.requires_grad for each in one.parameters())]
    # One each: groups of different modules may not share a parameter.
    placeholders = {nn.Parameter(torch.empty(0)) for _ in holders}
    for holder, placeholder in zip(holders, placeholders, strict=True):
        holder.register_parameter(_PLACEHOLDER, placeholder)
    try:
        yield
    finally:
        for holder in holders:
            delattr(holder, _PLACEHOLDER)
    for optimizer in optimizers():
        for group in optimizer.param_groups:
            for placeholder in placeholders.intersection(group["params"]):
                optimizer.state.pop(placeholder, None)
            group["params"][:] = [one for one in group["params"] if one not in placeholders]


def refuse_fused(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that look for overflow by themselves, each on its own rank's gradients.

    Raises:
        SetupError: one is fused; to be raised only where losses are scaled.
    """
    for optimizer in optimizers:
        if any(group.get("fused") for group in optimizer.param_groups):
            raise SetupError(
                f"precision is '16-mixed' and {type(optimizer).__name__} is fused, so each rank would decide by itself"
                " whether gradients overflowed; make the optimiser with fused=False, or use 'bf16-mixed'"
            )
