"""Calls of the user's hooks before and during the transfer of a batch, each kind with a separate random stream."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.apply_func import move_data_to_device

from lightning_pipe._compat.fast_hooks import (
    call_strategy_hook,
    data_hook,
    is_profiling_or_logging_hooks,
    overrides_hook,
)
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.runtime.worker import is_worker_thread
from lightning_pipe.loops.data.random_streams import RandomStreams

_PREPARES = ("on_before_batch_transfer",)
_TRANSFERS = ("transfer_batch_to_device", "on_after_batch_transfer")


class BatchTransferHooks:
    """Calls the batch-transfer hooks as Lightning's loops do.

    If the user has not overridden a kind of hook, its random stream is not used, and the work of Lightning's default
    hooks is done without calling them.
    """

    def __init__(self, trainer: pl.Trainer, streams: RandomStreams) -> None:
        self._trainer = trainer
        self._device = trainer.strategy.root_device
        self._streams = streams

    def prepare_batch_for_transfer(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Convert the batch for the precision plugin and call ``on_before_batch_transfer``."""
        if self._has(_PREPARES):
            return self._streams.run_with_stream(
                "prepare", partial(self._call_before_transfer_hook, batch, dataloader_idx)
            )
        if is_profiling_or_logging_hooks(self._trainer):
            return self._call_before_transfer_hook(batch, dataloader_idx)
        return self._trainer.strategy.precision_plugin.convert_input(batch)

    def move(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device and call ``on_after_batch_transfer``.

        In a worker thread the hooks have no random stream of their own, and no profiler records them.
        """
        strategy, draws = self._trainer.strategy, self._has(_TRANSFERS)
        if not (draws or overrides_hook(strategy, "batch_to_device") or is_profiling_or_logging_hooks(self._trainer)):
            return move_data_to_device(batch, self._device)
        if is_worker_thread():
            return self._move_on_worker(batch, dataloader_idx)
        move = partial(call_strategy_hook, self._trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx)
        return self._streams.run_with_stream("transfer", move) if draws else move()

    def _move_on_worker(self, batch: Any, dataloader_idx: int) -> Any:
        trainer = self._trainer
        if users := find_user_transfer_hooks(trainer, getattr(trainer.strategy, "transfer_on_worker", False)):
            raise SetupError(
                f"a worker thread moves batches to the device, but training has begun without {', '.join(users)}. Set"
                " hooks and profilers before fit, or, for hooks, pass transfer_on_worker=True to the strategy"
            )
        # Lightning's helpers would store the hook's name in the module, for calls of log() in the main thread.
        move, after = (data_hook(trainer, name) for name in _TRANSFERS)
        return after(move(batch, self._device, dataloader_idx), dataloader_idx)

    def _call_before_transfer_hook(self, batch: Any, dataloader_idx: int) -> Any:
        batch = self._trainer.precision_plugin.convert_input(batch)
        return self._trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)

    def _has(self, hooks: tuple[str, ...]) -> bool:
        """Return True if the user has overridden a hook. Checked for each batch: hooks may be set during an epoch."""
        return any(
            overrides_hook(holder, name) for holder in _list_module_and_datamodule(self._trainer) for name in hooks
        )


def find_user_transfer_hooks(trainer: pl.Trainer, hooks_may_leave: bool = False) -> list[str]:
    """Names of the user's parts in the transfer of a batch, which belong to the main thread; empty without any."""
    of_strategy = (
        [f"{type(trainer.strategy).__name__}.batch_to_device"]
        if overrides_hook(trainer.strategy, "batch_to_device")
        else []
    )
    if hooks_may_leave:
        return of_strategy
    of_hooks = [
        f"{type(holder).__name__}.{name}"
        for holder in _list_module_and_datamodule(trainer)
        for name in _TRANSFERS
        if overrides_hook(holder, name)
    ]
    return [*of_hooks, *of_strategy, *(["a profiler of hooks"] if is_profiling_or_logging_hooks(trainer) else [])]


def _list_module_and_datamodule(trainer: pl.Trainer) -> list[Any]:
    module, datamodule = trainer.strategy.lightning_module, getattr(trainer, "datamodule", None)
    return [module] if datamodule is None else [module, datamodule]
