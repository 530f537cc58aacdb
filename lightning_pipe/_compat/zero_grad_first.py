"""Automatic optimization for a ``training_step`` that runs backward itself."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch.optim import Optimizer

from lightning_pipe._compat.lightning import AutomaticOptimization, copy_as_subclass


class ZeroGradFirstOptimization(AutomaticOptimization):
    """Zeroes gradients before ``training_step``, with the usual hooks. Lightning zeroes them after ``training_step``.

    A pipeline schedule runs backward together with forward, in ``training_step``. Zeroing after it would delete the new
    gradients, and the model would not train.
    """

    _on_zero_grad: Callable[[], None] | None

    @classmethod
    def install(cls, trainer: pl.Trainer, on_zero_grad: Callable[[], None] | None = None) -> None:
        """Replace the trainer's automatic optimization, keeping its progress."""
        loop = copy_as_subclass(trainer.fit_loop.epoch_loop.automatic_optimization, cls)
        loop._on_zero_grad = on_zero_grad
        trainer.fit_loop.epoch_loop.automatic_optimization = loop

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        step = self._make_step_fn(kwargs)
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)

        def zero_grad_and_training_step() -> ClosureResult:
            if zero_grad is not None:
                if self._on_zero_grad is not None:
                    self._on_zero_grad()
                zero_grad()
            return step()

        return Closure(step_fn=zero_grad_and_training_step, backward_fn=self._make_backward_fn(optimizer))
