"""Faster versions of Lightning's per-batch work in the training loop.

Lightning calls about twenty hooks per batch, most of which are empty. Each call stores the name of the hook in the
module through ``nn.Module.__setattr__`` and enters the profiler. Together this takes a tenth of a millisecond per
batch. The functions below do the same, but skip empty hooks and a profiler that does nothing. With any other profiler,
or with Lightning's debug messages, they call Lightning's own helpers.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.core.hooks import DataHooks
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_pipe._compat.lightning import (
    AutomaticOptimization,
    EvaluationLoop,
    PredictionLoop,
    ResultCollection,
    ResultMetric,
    TrainingEpochLoop,
    copy_as_subclass,
)

_EMPTY = ("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward",
          "on_after_backward", "on_before_optimizer_step", "on_validation_batch_start", "on_validation_batch_end",
          "on_test_batch_start", "on_test_batch_end", "on_predict_batch_start", "on_predict_batch_end")  # fmt: skip
# Lightning's own methods at import time. A base-class method that is replaced later counts as overridden.
_OF_CALLBACKS, _OF_MODULES, _OF_STRATEGIES = (
    {name: getattr(base, name) for name in _EMPTY if hasattr(base, name)}
    for base in (pl.Callback, pl.LightningModule, Strategy)
)
_NO_DEFAULT = object()
_DEFAULTS: dict[str, Any] = {
    "on_before_batch_transfer": DataHooks.on_before_batch_transfer,
    "transfer_batch_to_device": DataHooks.transfer_batch_to_device,
    "on_after_batch_transfer": DataHooks.on_after_batch_transfer,
    "batch_to_device": Strategy.batch_to_device,
    "on_before_backward": pl.LightningModule.on_before_backward,
    "backward": pl.LightningModule.backward,
    "configure_gradient_clipping": pl.LightningModule.configure_gradient_clipping,
    "clip_gradients": pl.LightningModule.clip_gradients,
}
_log = logging.getLogger(call.__name__)


def is_profiling_or_logging_hooks(trainer: Any) -> bool:
    """Return True if a profiler or the debug log records each call of a hook."""
    return type(trainer.profiler) is not PassThroughProfiler or _log.isEnabledFor(logging.DEBUG)


def overrides_hook(holder: Any, hook_name: str) -> bool:
    """Return True if *holder*, or its class, overrides a method of Lightning."""
    return getattr(getattr(holder, hook_name), "__func__", None) is not _DEFAULTS[hook_name]


def call_callback_hooks(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> None:
    """Call a hook of all callbacks."""
    if _callbacks_have(trainer, hook_name) or is_profiling_or_logging_hooks(trainer):
        call._call_callback_hooks(trainer, hook_name, *args, **kwargs)


def call_module_hook(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a hook of the module and return its result."""
    module = trainer.strategy._lightning_module
    if module is None or is_profiling_or_logging_hooks(trainer):
        return call._call_lightning_module_hook(trainer, hook_name, *args, **kwargs)
    return _call_hook_if_overridden(module, module, hook_name, _OF_MODULES, args, kwargs)


def call_strategy_hook(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the strategy as a hook and return its result."""
    if is_profiling_or_logging_hooks(trainer):
        return call._call_strategy_hook(trainer, hook_name, *args, **kwargs)
    strategy = trainer.strategy
    return _call_hook_if_overridden(strategy._lightning_module, strategy, hook_name, _OF_STRATEGIES, args, kwargs)


def data_hook(trainer: pl.Trainer, hook_name: str) -> Callable[..., Any]:
    """Return the transfer hook *hook_name* of the data module or module, without Lightning's record of the call."""
    selector = trainer._data_connector._datahook_selector
    assert selector is not None, "the trainer has attached its data"
    hook: Callable[..., Any] = getattr(selector.get_instance(hook_name), hook_name)
    return hook


def _callbacks_have(trainer: Any, hook_name: str) -> bool:
    default = _OF_CALLBACKS.get(hook_name, _NO_DEFAULT)
    for callback in trainer.callbacks:
        if getattr(getattr(callback, hook_name, None), "__func__", None) is not default:
            return True
    return False


def _call_hook_if_overridden(
    module: Any, holder: Any, hook_name: str, defaults: dict[str, Any], args: Any, kwargs: Any
) -> Any:
    hook = getattr(holder, hook_name)
    if getattr(hook, "__func__", None) is defaults.get(hook_name, _NO_DEFAULT) or not callable(hook):
        return None
    before = module._current_fx_name
    object.__setattr__(module, "_current_fx_name", hook_name)
    output = hook(*args, **kwargs)
    object.__setattr__(module, "_current_fx_name", before)
    return output


class _QuickResult(ClosureResult):
    """Result of ``training_step`` that skips the division of the loss by 1."""

    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        if normalize == 1 and type(training_step_output) is Tensor and training_step_output.is_floating_point():
            return cls(training_step_output)
        return super().from_training_step_output(training_step_output, normalize)


class FastAutomaticOptimization(AutomaticOptimization):
    """Lightning's automatic optimization with the faster hook calls of this module."""

    output_result_cls = _QuickResult

    def _make_backward_fn(self, optimizer: torch.optim.Optimizer) -> Any:
        if self._skip_backward:
            return None

        def backward(loss: Tensor) -> None:
            trainer, module = self.trainer, self.trainer.strategy._lightning_module
            takes = overrides_hook(module, "on_before_backward") or overrides_hook(module, "backward")
            if takes or _callbacks_have(trainer, "on_before_backward"):
                loss = loss / 1  # a copy: hooks may change it in place, but not the result of the step
            call_strategy_hook(trainer, "backward", loss, optimizer)

        return backward

    # Without call_module_hook and call_strategy_hook, so that fewer frames lie between Trainer.fit and training_step.

    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Any) -> None:
        trainer = self.trainer
        strategy: Any = trainer.strategy
        if is_profiling_or_logging_hooks(trainer) or strategy.handles_gradient_accumulation:
            super()._optimizer_step(batch_idx, train_step_and_backward_closure)
            return
        # The last batch of an accumulation: Lightning calls only the closure for the others.
        module, steps = strategy._lightning_module, self.optim_progress.optimizer.step
        optimizer = strategy._lightning_optimizers[0]
        steps.increment_ready()
        before = module._current_fx_name
        object.__setattr__(module, "_current_fx_name", "optimizer_step")
        module.optimizer_step(trainer.current_epoch, batch_idx, optimizer, train_step_and_backward_closure)
        object.__setattr__(module, "_current_fx_name", before)
        steps.increment_completed()

    def _training_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        trainer = self.trainer
        strategy: Any = trainer.strategy
        if is_profiling_or_logging_hooks(trainer):
            return super()._training_step(kwargs)
        module = strategy._lightning_module
        before = module._current_fx_name
        object.__setattr__(module, "_current_fx_name", "training_step")
        output = strategy.training_step(*kwargs.values())
        object.__setattr__(module, "_current_fx_name", before)
        strategy.post_training_step()
        if output is None and trainer.world_size > 1:
            raise RuntimeError(
                "Skipping the `training_step` by returning None in distributed training is not supported: other ranks"
                " would wait for this rank's gradients. Return a loss of zero that depends on the parameters."
            )
        return self.output_result_cls.from_training_step_output(output, trainer.accumulate_grad_batches)

    def _on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.optim_progress.optimizer.zero_grad.increment_ready()
        call_callback_hooks(self.trainer, "on_before_zero_grad", optimizer)
        call_module_hook(self.trainer, "on_before_zero_grad", optimizer)
        self.optim_progress.optimizer.zero_grad.increment_started()

    def _optimizer_zero_grad(self, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        trainer = self.trainer
        call_module_hook(trainer, "optimizer_zero_grad", trainer.current_epoch, batch_idx, optimizer)
        self.optim_progress.optimizer.zero_grad.increment_completed()


class FastPrecision(Precision):
    """Lightning's precision with the faster hook calls of this module."""

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        call_callback_hooks(module.trainer, "on_before_backward", tensor)
        call_module_hook(module.trainer, "on_before_backward", tensor)
        return tensor

    def post_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        loss = tensor.detach()
        call_callback_hooks(module.trainer, "on_after_backward")
        call_module_hook(module.trainer, "on_after_backward")
        return loss

    def _after_closure(self, model: pl.LightningModule, optimizer: Any) -> None:
        trainer = model.trainer
        call_callback_hooks(trainer, "on_before_optimizer_step", optimizer)
        call_module_hook(trainer, "on_before_optimizer_step", optimizer)
        clip, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm
        replaced = overrides_hook(model, "configure_gradient_clipping") or overrides_hook(model, "clip_gradients")
        if clip or replaced or is_profiling_or_logging_hooks(trainer):
            self._clip_gradients(model, optimizer, clip, gradient_clip_algorithm=algorithm)

    def train_step_context(self) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self.forward_context()


class FastMixedPrecision(MixedPrecision, FastPrecision):
    """Lightning's mixed precision with the faster hook calls of this module."""


_QUICK_PRECISIONS = {Precision: FastPrecision, MixedPrecision: FastMixedPrecision}


def install_fast_hook_calls(loop: TrainingEpochLoop) -> None:
    """Replace Lightning's own optimization loop, results and precision plugin with faster ones; custom ones stay."""
    precision = loop.trainer.precision_plugin
    # In place, since the strategy and its user hold the object.
    precision.__class__ = _QUICK_PRECISIONS.get(type(precision), type(precision))
    if type(loop.automatic_optimization) is AutomaticOptimization:
        loop.automatic_optimization = copy_as_subclass(loop.automatic_optimization, FastAutomaticOptimization)
    if type(loop._results) is ResultCollection and not loop._results:
        loop._results = _QuickResults(training=True)


def notify_logger_of_batch_start(loop: TrainingEpochLoop, batch: Any) -> None:
    """Notify the trainer's logger connector that a batch of *loop* begins."""
    connector, results = loop.trainer._logger_connector, loop._results
    connector._first_loop_iter = connector._first_loop_iter is None
    results.batch, results.batch_size, results.dataloader_idx = batch, None, None


def notify_logger_of_batch_end(loop: TrainingEpochLoop) -> None:
    """Notify the trainer's logger connector that a batch of *loop* has ended."""
    results = loop._results
    if results or loop.trainer.state.stage is not RunningStage.TRAINING:
        loop.trainer._logger_connector.on_batch_end()
    else:  # nothing was logged
        results.batch = results.batch_size = None


def log_batch(loop: TrainingEpochLoop) -> None:
    """Pass the values that a batch of *loop* has logged to the loggers."""
    if loop._results:
        loop.trainer._logger_connector.update_train_step_metrics()


def evaluate_batch(
    loop: EvaluationLoop, batch: Any, batch_idx: int, dataloader_idx: int, run: Callable[[Callable[[], Any]], Any]
) -> None:
    """Do Lightning's work for a batch of a validation or test; *run* is called with the step and returns its result."""
    trainer, stage = loop.trainer, "test" if loop.trainer.testing else "validation"
    step, connector = f"{stage}_step", trainer._logger_connector
    loader = dataloader_idx if loop._is_sequential and loop.num_dataloaders > 1 else None
    hook_kwargs = loop._build_kwargs(batch, batch_idx, loader)
    loop.batch_progress.increment_ready()
    connector.on_batch_start(batch, loader)
    call_callback_hooks(trainer, f"on_{stage}_batch_start", *hook_kwargs.values())
    call_module_hook(trainer, f"on_{stage}_batch_start", *hook_kwargs.values())
    loop.batch_progress.increment_started()

    arguments = loop._build_step_args_from_hook_kwargs(hook_kwargs, step)
    output = run(lambda: call_strategy_hook(trainer, step, *arguments))
    loop.batch_progress.increment_processed()

    call_callback_hooks(trainer, f"on_{stage}_batch_end", output, *hook_kwargs.values())
    call_module_hook(trainer, f"on_{stage}_batch_end", output, *hook_kwargs.values())
    connector.on_batch_end()
    loop.batch_progress.increment_completed()
    if not trainer.sanity_checking:
        loop._has_run = True
        connector.update_eval_step_metrics(loop._seen_batches_per_dataloader[dataloader_idx])
        loop._seen_batches_per_dataloader[dataloader_idx] += 1


def predict_batch(
    loop: PredictionLoop, batch: Any, batch_idx: int, dataloader_idx: int, run: Callable[[Callable[[], Any]], Any]
) -> None:
    """Do Lightning's work for a batch of a prediction; *run* is called with the step and returns its result."""
    trainer = loop.trainer
    loop.batch_progress.increment_ready()
    keeps = loop._store_data_for_prediction_writer(batch_idx, dataloader_idx)
    hook_kwargs = loop._build_kwargs(batch, batch_idx, dataloader_idx if loop.num_dataloaders > 1 else None)
    call_callback_hooks(trainer, "on_predict_batch_start", *hook_kwargs.values())
    call_module_hook(trainer, "on_predict_batch_start", *hook_kwargs.values())
    loop.batch_progress.increment_started()

    arguments = loop._build_step_args_from_hook_kwargs(hook_kwargs, "predict_step")
    predictions = run(lambda: call_strategy_hook(trainer, "predict_step", *arguments))
    if predictions is None:
        loop._warning_cache.warn("predict returned None if it was on purpose, ignore this warning...")
    loop.batch_progress.increment_processed()

    call_callback_hooks(trainer, "on_predict_batch_end", predictions, *hook_kwargs.values())
    call_module_hook(trainer, "on_predict_batch_end", predictions, *hook_kwargs.values())
    loop.batch_progress.increment_completed()
    if loop._return_predictions or keeps:
        loop._predictions[dataloader_idx].append(move_data_to_device(predictions, torch.device("cpu")))


class _QuickResults(ResultCollection):
    """Lightning's logged values, without moves of accumulators that are already on the device of the value.

    Attributes:
        restored: keys of values that came from a checkpoint.
    """

    def __init__(self, training: bool) -> None:
        super().__init__(training)
        self.restored: set[str] = set()

    @torch.compiler.disable
    def log(self, fx: str, name: str, *args: Any, **kwargs: Any) -> None:
        try:
            super().log(fx, name, *args, **kwargs)
        except MisconfigurationException:
            if (key := f"{fx}.{name}") not in self.restored:
                raise
            # The run that wrote the checkpoint has logged the value with other arguments.
            self.restored.remove(key)
            del self[key]
            super().log(fx, name, *args, **kwargs)

    def __setitem__(self, key: str, metric: ResultMetric) -> None:
        super().__setitem__(
            key, _FastDeviceMoveResultMetric(metric.meta, metric.is_tensor) if type(metric) is ResultMetric else metric
        )


class _FastDeviceMoveResultMetric(ResultMetric):
    def to(self, *args: Any, **kwargs: Any) -> ResultMetric:  # type: ignore[override]  # as the base
        if len(args) == 1 and not kwargs and isinstance(args[0], torch.device) and self._is_on_device(args[0]):
            return self
        return super().to(*args, **kwargs)

    def _is_on_device(self, device: torch.device) -> bool:
        """Return True if all tensors of the metric are on *device*: the accumulated values and their defaults."""
        return self.is_tensor and all(
            value.device == device
            for values in (vars(self), self._defaults)
            for value in values.values()
            if isinstance(value, Tensor)
        )
