"""Applies the gradient handling of Lightning's precision plugin to sharded tables: unscale, clip, skip.

Lightning handles dense gradients inside ``optimizer_step``. Tables are trained after it, when the results are known::

    precision plugin    closure ─── unscale ─── hooks ─── clip ─── step, skipped after an overflow
    this module                └ overflow of          └ one norm   └ skipped?
                                 tables: also dense      of all
    tasks         | DenseBackward, FinalizeGrads | OptimStep ................. | EmbBackward: scaled, or skipped
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from torch.optim import Optimizer

from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.kernels.gradient_norm import clip_dense_grads_by_global_norm
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel
from lightning_pipe.recsys.tasks.context import RecsysContext
from lightning_pipe.strategies.setup_checks import CLIP_BY_VALUE_ERROR, get_grad_scaler


class TablePrecisionPluginAdapter:
    """Makes a precision plugin act on the tables' gradients of the current batch, until :meth:`close`."""

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
        self._scaler = get_grad_scaler(precision)
        self._current = current
        self._without_step = False
        self._clip_dense = precision.clip_grad_by_norm
        precision.clip_grad_by_norm = self._clip_grad_by_norm  # type: ignore[method-assign]
        precision.clip_grad_by_value = self._refuse_clip_grad_by_value  # type: ignore[method-assign]

    def restore_precision_plugin(self) -> None:
        """Restore the plugin's methods. May be called again."""
        for replaced in ("clip_grad_by_norm", "clip_grad_by_value"):
            self._precision.__dict__.pop(replaced, None)

    def record_loss_scale(self) -> None:
        """Record the loss scale at the beginning of a batch's training step."""
        ctx = self._current()
        if self._scaler is not None and ctx is not None:
            # The loss of this batch will be multiplied by the same scale.
            ctx.gradient_scale = self._scaler.scale(torch.ones((), device=self._device)).reciprocal()

    @contextmanager
    def skipping_tables_if_step_skipped(self, optimizer: Optimizer) -> Iterator[None]:
        """Context of the plugin's ``optimizer_step``. If it skips the optimizer step, the tables skip it too."""
        if self._scaler is None:
            yield
            return
        stepped = self._without_step = False

        def note_step(optimizer: Optimizer, *_: Any) -> None:
            nonlocal stepped
            # An optimizer that unscales gradients itself is always called, and gets found_inf.
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

    def report_overflow(self, optimizer: Optimizer) -> None:
        """Report an overflow of the tables' gradients to the scaler, between the closure and the plugin's unscaling."""
        ctx = self._current()
        if self._scaler is None or ctx is None or not ctx.tables_skipped:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.inf)

    def scaler_has_no_dense_gradients(self, optimizer: Optimizer) -> bool:
        """Return True if the scaler cannot step because no rank had a loss, and so no dense gradient exists."""
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self._without_step = self._scaler is not None and all(parameter.grad is None for parameter in parameters)
        return self._without_step

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Replacement of the plugin's method that clips by the norm of all gradients, including tables."""
        ctx = self._current()
        if ctx is None or ctx.embeddings.kernel_gradients is None:  # no loss: the tables have no gradients
            self._clip_dense(optimizer, clip_val)
            return
        scale = ctx.gradient_scale if ctx.has("gradient_scale") else 1.0  # includes the loss scale and earlier clipping
        tables = self._sharded.table_gradient_norm(ctx.embeddings.kernel_gradients) * scale
        ctx.gradient_scale = (
            clip_dense_grads_by_global_norm(self._precision.main_params(optimizer), tables, clip_val) * scale
        )

    def _refuse_clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Replacement of the plugin's method."""
        raise SetupError(CLIP_BY_VALUE_ERROR)
