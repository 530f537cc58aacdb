"""Lightning's automatic optimisation for a ``training_step`` that runs backward inside."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch.optim import Optimizer

from lightning_pipe._compat.lightning import AutomaticOptimization


class ZeroGradFirst(AutomaticOptimization):
    """Zeroes gradients before ``training_step``, with the hooks around it; Lightning does so after.

    A pipeline schedule runs backward together with forward: what Lightning zeroes after that would be the gradients
    themselves, and nothing would be trained.
    """

    _on_zero_grad: Callable[[], None] | None

    @classmethod
    def install(cls, trainer: pl.Trainer, on_zero_grad: Callable[[], None] | None = None) -> None:
        """Put one in the place of the trainer's, with its progress.

        Args:
            trainer: that is set up for ``fit``.
            on_zero_grad: called where the batches of a step begin, before gradients are zeroed.
        """
        present = trainer.fit_loop.epoch_loop.automatic_optimization
        loop = present
        if not isinstance(loop, cls):
            loop = cls.__new__(cls)
            loop.__dict__.update(present.__dict__)
        loop._on_zero_grad = on_zero_grad
        trainer.fit_loop.epoch_loop.automatic_optimization = loop

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        step = self._make_step_fn(kwargs)
        zero_grad = self._make_zero_grad_fn(batch_idx, optimizer)

        def zero_grad_and_step() -> ClosureResult:
            if zero_grad is not None:
                if self._on_zero_grad is not None:
                    self._on_zero_grad()
                zero_grad()
            return step()

        return Closure(step_fn=zero_grad_and_step, backward_fn=self._make_backward_fn(optimizer))
