"""Private names of Lightning: the loops that this package extends, and the names that they use."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, Self, TypeVar

import lightning.pytorch as pl
import torch
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.utilities.data import _set_sampler_epoch as set_sampler_epoch
from lightning.fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.optimizer import _configure_optimizers as optimizers_configured
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop as EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher as DataFetcher
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher as DataLoaderIterDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop as FitLoop
from lightning.pytorch.loops.loop import _Loop as Loop
from lightning.pytorch.loops.optimization.automatic import _AutomaticOptimization as AutomaticOptimization
from lightning.pytorch.loops.prediction_loop import _PredictionLoop as PredictionLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop as TrainingEpochLoop
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata as Metadata
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection as ResultCollection
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric as ResultMetric
from lightning.pytorch.trainer.connectors.logger_connector.result import _Sync as Sync
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.data import _extract_batch_size as batch_sizes

__all__ = [
    "AutomaticOptimization",
    "DataFetcher",
    "DataLoaderIterDataFetcher",
    "EvaluationLoop",
    "FitLoop",
    "Loop",
    "Metadata",
    "PredictionLoop",
    "ResultCollection",
    "ResultMetric",
    "SignalConnector",
    "Sync",
    "TrainingEpochLoop",
    "batch_sizes",
    "call_on_after_batch_transfer",
    "copy_as_subclass",
    "disable_distributed_sampler",
    "discard_logged_values",
    "get_combined_loader",
    "get_layer_sync_plugin",
    "has_val_time_interval",
    "hide_loop_dataloaders",
    "install_ckpt_path_check",
    "is_accumulating",
    "next_hpc_checkpoint",
    "optimizers_configured",
    "optimizers_to_device",
    "patch_last_checkpoint_for_urls",
    "set_sampler_epoch",
    "strategy_timeout",
    "teardown_trainer",
    "training_loader",
    "transfer_batch_with_hooks",
    "wrapped_sampler",
]


T = TypeVar("T")


def copy_as_subclass(present: Any, kind: type[T]) -> T:
    """Instance of the subclass *kind* with the attributes of *present*, which other code may hold already."""
    if isinstance(present, kind):
        return present
    instance = kind.__new__(kind)
    vars(instance).update(vars(present))
    return instance


class SignalConnector(_SignalConnector):
    """Lightning's signal connector, with public names for its handlers."""

    @classmethod
    def install_in_trainer(cls, trainer: pl.Trainer) -> Self:
        """Replace the trainer's signal connector, and return the new one."""
        trainer._signal_connector = connector = copy_as_subclass(trainer._signal_connector, cls)
        return connector

    def on_slurm_signal(self, signum: int | signal.Signals, frame: FrameType) -> None:
        """Save a checkpoint and put the job back into the queue, immediately and on this rank alone."""
        super()._slurm_sigusr_handler_fn(signum, frame)

    def on_sigterm(self, signum: int | signal.Signals, frame: FrameType) -> None:
        """Notify all ranks, immediately."""
        super()._sigterm_notifier_fn(signum, frame)

    def _slurm_sigusr_handler_fn(self, signum: int | signal.Signals, frame: FrameType) -> None:
        self.on_slurm_signal(signum, frame)

    def _sigterm_notifier_fn(self, signum: int | signal.Signals, frame: FrameType) -> None:
        self.on_sigterm(signum, frame)


def strategy_timeout(strategy: Any) -> timedelta:
    """Time limit of the collectives of one of Lightning's strategies for several processes."""
    return strategy._timeout or timedelta(minutes=30)


def disable_distributed_sampler(trainer: pl.Trainer) -> None:
    """Make the trainer install no distributed sampler."""
    trainer._accelerator_connector.use_distributed_sampler = False


def training_loader(trainer: pl.Trainer) -> Any:
    """Dataloader of the training, before its loop has set it up."""
    return trainer.fit_loop._data_source.dataloader()


def transfer_batch_with_hooks(module: pl.LightningModule, batch: Any, device: torch.device) -> Any:
    """Batch on a device, after all three transfer hooks."""
    return module._apply_batch_transfer_handler(batch, device)


def call_on_after_batch_transfer(module: pl.LightningModule, batch: Any, dataloader_idx: int) -> Any:
    """Result of the hook ``on_after_batch_transfer`` of the module or its data module."""
    return module._call_batch_hook("on_after_batch_transfer", batch, dataloader_idx)


def get_layer_sync_plugin(strategy: Any) -> Any:
    """Plugin of ``Trainer(sync_batchnorm=True)`` with ``apply`` and ``revert``; None without it."""
    return strategy._layer_sync


def next_hpc_checkpoint(trainer: pl.Trainer) -> str:
    """Path of the next checkpoint of a job that Slurm stops, which Lightning finds when the job is requeued."""
    return str(trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir))


def patch_last_checkpoint_for_urls(trainer: pl.Trainer) -> None:
    """Make ``ckpt_path="last"`` find checkpoints at URLs. Lightning 2.6 drops their protocol, and finds none."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and not isinstance(callback._find_last_checkpoints, partial):
            callback._find_last_checkpoints = partial(_find_last_checkpoint_urls, callback._find_last_checkpoints)  # type: ignore[method-assign]


def _find_last_checkpoint_urls(find: Callable[[pl.Trainer], set[str]], trainer: pl.Trainer) -> set[str]:
    file_system = find.__self__._fs  # type: ignore[attr-defined]
    paths = find(trainer)
    return paths if isinstance(file_system, LocalFileSystem) else {file_system.unstrip_protocol(path) for path in paths}


def install_ckpt_path_check(trainer: pl.Trainer, check: Callable[[object], None]) -> None:
    """Call *check* with the path of the checkpoint, None without one, before the trainer reads it."""
    connector = trainer._checkpoint_connector
    if not isinstance(connector.resume_start, partial):
        connector.resume_start = partial(_check_ckpt_path_then_resume, check, connector.resume_start)  # type: ignore[method-assign]


def _check_ckpt_path_then_resume(
    check: Callable[[object], None], resume: Callable[..., None], path: object = None, *more: object, **named: object
) -> None:
    check(path)
    resume(path, *more, **named)


def is_accumulating(loop: TrainingEpochLoop) -> bool:
    """Return True between two optimizer steps, if gradients of several batches are accumulated."""
    return bool(loop.batch_progress.current.ready and loop._should_accumulate())


@contextmanager
def discard_logged_values(trainer: pl.Trainer, module: pl.LightningModule) -> Iterator[None]:
    """Context in which ``training_step`` may be called between two batches, and values that it logs are discarded."""
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    before = loop._results, connector._current_fx, connector._first_loop_iter, module._current_fx_name
    loop._results = ResultCollection(training=True)
    connector._first_loop_iter = True
    module._current_fx_name = "training_step"
    try:
        yield
    finally:
        loop._results, connector._current_fx, connector._first_loop_iter, module._current_fx_name = before


def get_combined_loader(loop: EvaluationLoop | FitLoop | PredictionLoop) -> CombinedLoader | None:
    """Dataloaders of a loop; None before they are set up."""
    return loop._combined_loader


@contextmanager
def hide_loop_dataloaders(loop: FitLoop) -> Iterator[None]:
    """Context in which a loop has no dataloaders."""
    loader, loop._combined_loader = loop._combined_loader, None
    try:
        yield
    finally:
        loop._combined_loader = loader


def has_val_time_interval(trainer: pl.Trainer) -> bool:
    """Return True if ``val_check_interval`` is a time."""
    return trainer._val_check_time_interval is not None  # type: ignore[attr-defined]


def teardown_trainer(trainer: pl.Trainer) -> None:
    """End a trainer's loops, strategy and signal handlers, as after an error."""
    trainer._teardown()


def wrapped_sampler(sampler: Any) -> Any:
    """Sampler in Lightning's ``DistributedSamplerWrapper``; None if *sampler* is no such wrapper."""
    return getattr(getattr(sampler, "dataset", None), "_sampler", None)
