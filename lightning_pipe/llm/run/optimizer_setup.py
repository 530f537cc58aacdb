"""The user's ``configure_optimizers`` on a rank that holds only some of the model's parameters.

Tested in ``tests/strategies/language_model/test_strategy.py``.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_pipe.engine.plans.errors import SetupError

__all__ = ["empty_optimizers_allowed", "refuse_fused"]


@contextmanager
def empty_optimizers_allowed() -> Generator[None, None, None]:
    """Let optimisers be made of no parameters, as they are on a rank whose stages are all frozen; PyTorch refuses."""
    make = Optimizer.__init__

    def make_also_of_none(self: Optimizer, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        given: Any = params if isinstance(params, Tensor) else list(params)
        make(self, [{"params": []}] if isinstance(given, list) and not given else given, defaults)

    Optimizer.__init__ = make_also_of_none  # type: ignore[method-assign]
    try:
        yield
    finally:
        Optimizer.__init__ = make  # type: ignore[method-assign]


def refuse_fused(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimisers that look for overflow by themselves, each on its own rank's gradients.

    Raises:
        SetupError: one is fused; to be raised only where losses are scaled.
    """
    for optimizer in optimizers:
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            raise SetupError(
                f"precision is '16-mixed' and {type(optimizer).__name__} is fused, so each rank would decide by itself"
                " whether gradients overflowed; make the optimiser with fused=False, or use 'bf16-mixed'"
            )
