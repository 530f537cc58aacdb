"""What a Trainer may ask for and sharded tables cannot do: refused by name when training is set up.

Tested in ``tests/strategies/recommender/test_strategy.py``.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_pipe.engine import SetupError

CLIPS_BY_VALUE = (
    "gradient_clip_algorithm is 'value', but the gradients of table rows exist only inside the fused optimiser; clip by"
    " 'norm', which is one global norm over dense and sharded parameters"
)


def loss_scaler(precision: Precision) -> torch.amp.GradScaler | None:
    """The plugin's loss scaler, if it has one."""
    return precision.scaler if isinstance(precision, MixedPrecision) else None


def refuse_other_precision(plugin: Precision) -> None:
    """Refuse a precision that casts parameters.

    Raises:
        SetupError: it is none of "32-true", "bf16-mixed" and "16-mixed".
    """
    if plugin.precision not in ("32-true", "bf16-mixed", "16-mixed"):
        raise SetupError(
            f"precision is {plugin.precision!r}, which would cast the dense parameters, but FBGEMM keeps tables and"
            " their outputs in float32; use '32-true', 'bf16-mixed' or '16-mixed'"
        )


def refuse_training(trainer: pl.Trainer, module: pl.LightningModule, plugin: Precision) -> None:
    """Refuse what cannot work while tables are trained.

    Raises:
        SetupError: names what was found, why it cannot work, and what to use.
    """
    if not module.automatic_optimization:
        raise SetupError(
            "the module optimises by hand (automatic_optimization is False), but a recsys plan runs the steps of"
            " one iteration as separate tasks. Use automatic optimisation, or strategy='pipeline'"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise SetupError(
            "training_step takes the dataloader_iter, but a recsys plan fetches batches itself. Write"
            " training_step(self, batch, batch_idx), or use strategy='pipeline', which then runs Lightning's loop"
        )
    refuse_callbacks_of_whole_modules(trainer)
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        raise SetupError(CLIPS_BY_VALUE)
    accumulated = _most_accumulated(trainer)
    if clips_gradients(trainer) and accumulated > 1:
        raise SetupError(
            f"gradients are clipped and accumulate_grad_batches is {accumulated}, but tables are updated in every"
            " micro-batch's backward, before the norm of all is known. Use accumulate_grad_batches=1 or no clipping"
        )
    if loss_scaler(plugin) is not None and accumulated > 1:
        raise SetupError(
            f"precision is '16-mixed' and accumulate_grad_batches is {accumulated}, but tables are updated in every"
            " micro-batch's backward, before it is known whether a later one overflows and the step is skipped. Use"
            " accumulate_grad_batches=1, 'bf16-mixed' or '32-true'"
        )


def refuse_scaled_fp16(trainer: pl.Trainer, plugin: Precision, backward: str) -> None:
    """Refuse to send gradients that are scaled up as numbers that end at 65504.

    Args:
        trainer: about to train.
        plugin: its precision.
        backward: what the tables' gradients travel as.

    Raises:
        SetupError: gradients travel as fp16, and are unscaled only where they arrive.
    """
    if backward == "fp16" and clips_gradients(trainer) and loss_scaler(plugin) is not None:
        raise SetupError(
            "wire.quantized_comms has backward='fp16', precision is '16-mixed' and gradients are clipped: the tables'"
            " gradients are then sent as the loss scale has made them, and those beyond 65504 would be cut off without"
            " a word; use backward='bf16', no clipping, or another precision"
        )


def refuse_callbacks_of_whole_modules(trainer: pl.Trainer) -> None:
    """Refuse callbacks that average, or prune, the weights of the module as it was made, where no rank holds all.

    Raises:
        SetupError: names the callback.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (WeightAveraging, StochasticWeightAveraging, ModelPruning)):
            raise SetupError(
                f"callback {type(callback).__name__} works on the weights of the whole module, as it was made, but"
                " ranks hold parts of it; needed is a run without it, or strategy='pipeline', where each rank holds all"
            )


def clips_gradients(trainer: pl.Trainer) -> bool:
    """Whether the trainer, or a hook of the module's own, clips gradients."""
    return bool(trainer.gradient_clip_val) or is_overridden("configure_gradient_clipping", trainer.lightning_module)


def _most_accumulated(trainer: pl.Trainer) -> int:
    """The most batches that the trainer is going to accumulate gradients over."""
    factors = [trainer.accumulate_grad_batches]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            factors += callback.scheduling.values()
    return max(factors)
