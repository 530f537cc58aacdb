"""What Lightning's precision plugin does to gradients, done to those of sharded tables too: unscale, clip, skip.

Lightning does all of it inside ``optimizer_step``, to dense gradients; the tables' are not trained before it is known::

    precision plugin    closure ─── unscale ─── hooks ─── clip ─── step, unless a gradient overflowed
    here                       └ overflow of          └ one norm   └ did it step?
                                 tables: dense too       of all
    tasks         | DenseBackward, FinalizeGrads | OptimStep ................. | EmbBackward: scaled, or not at all

Tested in ``tests/scenarios/recommenders/test_gradient_clipping.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from torch.optim import Optimizer

from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.kernels.gradient_norm import clip_by_global_norm
from lightning_pipe.recsys.sharding.shard import ShardedModel
from lightning_pipe.recsys.tasks.context import RecsysContext
from lightning_pipe.strategies.refusals import CLIPS_BY_VALUE, loss_scaler


class TableGradients:
    """Makes a precision plugin act on the tables' gradients of the batch being trained, until it is closed.

    Args:
        precision: the plugin; its ``clip_grad_by_norm`` and ``clip_grad_by_value`` are replaced.
        sharded: the model whose tables are meant.
        device: where it trains.
        current: gives the context of the batch being trained, None between batches.
    """

    def __init__(
        self,
        precision: Precision,
        sharded: ShardedModel,
        device: torch.device,
        current: Callable[[], RecsysContext | None],
    ) -> None:
        self._precision = precision
        self._sharded = sharded
        self._device = device
        self._scaler = loss_scaler(precision)
        self._current = current
        self._without_step = False
        self._clip_dense = precision.clip_grad_by_norm
        precision.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        precision.clip_grad_by_value = self._clip_grad_by_value  # type: ignore[method-assign]

    def close(self) -> None:
        """Put back what was replaced; may be called again."""
        for replaced in ("clip_grad_by_norm", "clip_grad_by_value"):
            self._precision.__dict__.pop(replaced, None)

    def begin(self) -> None:
        """A batch's training step begins."""
        ctx = self._current()
        if self._scaler is not None and ctx is not None:
            # The loss is going to be scaled by the same.
            ctx.gradient_scale = self._scaler.scale(torch.ones((), device=self._device)).reciprocal()

    @contextmanager
    def stepping(self, optimizer: Optimizer) -> Iterator[None]:
        """Around the plugin's optimizer_step: if that skips the optimiser's, the tables are not trained either."""
        if self._scaler is None:
            yield
            return
        stepped = self._without_step = False

        def note_step(optimizer: Optimizer, *_: Any) -> None:
            nonlocal stepped
            # An optimiser that unscales by itself is called in any case, and told.
            found_inf = getattr(optimizer, "found_inf", None)
            stepped = found_inf is None or not bool(found_inf)

        hook = optimizer.register_step_post_hook(note_step)
        try:
            yield
        finally:
            hook.remove()
        ctx = self._current()
        if ctx is not None and not stepped and not self._without_step:
            ctx.tables_skipped = True

    def after_backward(self, optimizer: Optimizer) -> None:
        """Between the closure and the plugin's unscaling: tells the scaler of what overflowed in the tables' gradients.

        Args:
            optimizer: the dense one, on whose gradients the plugin bases its decision to step.
        """
        ctx = self._current()
        if self._scaler is None or ctx is None or not ctx.tables_skipped:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.inf)

    def leave_scaler_alone(self, optimizer: Optimizer) -> bool:
        """Whether the loss scaler cannot step, for want of a single dense gradient on any rank: none had a loss."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._without_step = self._scaler is not None and all(one.grad is None for one in parameters)
        return self._without_step

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """In place of the plugin's: the norm is that of all gradients, tables included."""
        ctx = self._current()
        if ctx is None or ctx.embeddings.kernel_gradients is None:  # no loss: the tables have no gradients
            self._clip_dense(optimizer, clip_val)
            return
        scale = ctx.gradient_scale if ctx.has("gradient_scale") else 1.0  # of the loss, and of an earlier clipping
        tables = self._sharded.table_gradient_norm(ctx.embeddings.kernel_gradients) * scale
        ctx.gradient_scale = clip_by_global_norm(self._precision.main_params(optimizer), tables, clip_val) * scale

    def _clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """In place of the plugin's.

        Raises:
            SetupError: the tables' gradients cannot be clipped so.
        """
        raise SetupError(CLIPS_BY_VALUE)
