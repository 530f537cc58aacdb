"""Checks at set-up for Trainer options and callbacks that sharded tables do not support."""

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

CLIP_BY_VALUE_ERROR = (
    "gradient_clip_algorithm is 'value', but the gradients of table rows exist only inside the fused optimizer. Set it"
    " to 'norm', which clips by one global norm over dense and sharded parameters"
)


def get_grad_scaler(precision: Precision) -> torch.amp.GradScaler | None:
    """Return the plugin's loss scaler, or None."""
    return precision.scaler if isinstance(precision, MixedPrecision) else None


def check_precision(plugin: Precision) -> None:
    """Refuse a precision that casts parameters."""
    if plugin.precision not in ("32-true", "bf16-mixed", "16-mixed"):
        raise SetupError(
            f"precision is {plugin.precision!r}, which would cast the dense parameters, but FBGEMM keeps tables and"
            " their outputs in float32. Use '32-true', 'bf16-mixed' or '16-mixed'"
        )


def check_training_options(
    trainer: pl.Trainer, module: pl.LightningModule, plugin: Precision, in_every_batch: bool = True
) -> None:
    """Refuse options of the trainer, module and callbacks that do not work while tables are trained."""
    if not module.automatic_optimization:
        raise SetupError(
            "the module uses manual optimization (automatic_optimization is False), but a recsys plan runs the parts of"
            " an iteration as separate tasks. Use automatic optimization, or strategy='pipeline'"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise SetupError(
            "training_step takes the dataloader_iter, but a recsys plan fetches batches itself. Define"
            " training_step(self, batch, batch_idx), or use strategy='pipeline', which then runs Lightning's loop"
        )
    check_callbacks(trainer, averages_weights=True)
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
        raise SetupError(CLIP_BY_VALUE_ERROR)
    accumulated = max_accumulate_grad_batches(trainer) if in_every_batch else 1
    if clips_gradients(trainer) and accumulated > 1:
        raise SetupError(
            f"gradients are clipped and accumulate_grad_batches is {accumulated}, but tables are updated in the"
            " backward of every micro-batch, before the norm of the accumulated gradients is known. Use"
            " accumulate_tables='window', accumulate_grad_batches=1 or no clipping"
        )
    if get_grad_scaler(plugin) is not None and accumulated > 1:
        raise SetupError(
            f"precision is '16-mixed' and accumulate_grad_batches is {accumulated}, but tables are updated in the"
            " backward of every micro-batch, before a later micro-batch may overflow and skip the step. Use"
            " accumulate_tables='window', accumulate_grad_batches=1, 'bf16-mixed' or '32-true'"
        )


def check_fp16_comms(trainer: pl.Trainer, plugin: Precision, backward: str) -> None:
    """Refuse to send scaled gradients in fp16, whose largest number is 65504."""
    if backward == "fp16" and clips_gradients(trainer) and get_grad_scaler(plugin) is not None:
        raise SetupError(
            "wire.quantized_comms has backward='fp16', precision is '16-mixed' and gradients are clipped. The tables'"
            " gradients are then sent before they are unscaled, and values beyond 65504 would be cut off silently. Use"
            " backward='bf16', no clipping, or another precision"
        )


def check_callbacks(trainer: pl.Trainer, averages_weights: bool = False) -> None:
    """Refuse callbacks that average or prune the weights of the whole module, which is in parts also on one rank."""
    refused = (StochasticWeightAveraging, ModelPruning, *(() if averages_weights else (WeightAveraging,)))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, refused):
            instead = "use WeightAveraging or EMAWeightAveraging, " if averages_weights else ""
            raise SetupError(
                f"callback {type(callback).__name__} works on the weights of the whole module, but this strategy keeps"
                f" them in parts, one for each rank ({trainer.world_size} here), which cannot be copied as a module."
                f" Remove the callback, {instead}or use strategy='pipeline', where each rank holds all weights in plain"
                " modules"
            )


def clips_gradients(trainer: pl.Trainer) -> bool:
    """Return True if the trainer or a hook of the module clips gradients."""
    return bool(trainer.gradient_clip_val) or is_overridden("configure_gradient_clipping", trainer.lightning_module)


def max_accumulate_grad_batches(trainer: pl.Trainer) -> int:
    """Largest number of batches over which the trainer accumulates gradients, at any point of the training."""
    factors = [trainer.accumulate_grad_batches]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            factors += callback.scheduling.values()
    return max(factors)
