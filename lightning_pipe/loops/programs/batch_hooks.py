"""The user's hooks that a batch passes on its way to the device, each kind drawing from a random stream of its own.

Tested in ``tests/scenarios/trainer/test_hook_order.py``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.apply_func import move_data_to_device

from lightning_pipe._compat.quick_lightning import call_strategy_hook, is_watched, replaces
from lightning_pipe.loops.data.random_streams import RandomStreams

_PREPARES = ("on_before_batch_transfer",)
_TRANSFERS = ("transfer_batch_to_device", "on_after_batch_transfer")


class BatchHooks:
    """Calls them on the main thread, as Lightning's loops do.

    Where the user has no hook of a kind, nothing draws, and what Lightning's own hooks do is done without calling them.

    Args:
        trainer: whose module, data module and strategy have them.
        streams: what they draw from.
    """

    def __init__(self, trainer: pl.Trainer, streams: RandomStreams) -> None:
        self._trainer = trainer
        self._streams = streams

    def prepare(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """What is done before a batch is moved."""
        if self._has(_PREPARES):
            return self._streams.draw("prepare", partial(self._prepared, batch, dataloader_idx))
        if is_watched(self._trainer):
            return self._prepared(batch, dataloader_idx)
        return self._trainer.precision_plugin.convert_input(batch)

    def move(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device, with what is done there."""
        strategy, draws = self._trainer.strategy, self._has(_TRANSFERS)
        if not (draws or replaces(strategy, "batch_to_device") or is_watched(self._trainer)):
            return move_data_to_device(batch, strategy.root_device)
        move = partial(call_strategy_hook, self._trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx)
        return self._streams.draw("transfer", move) if draws else move()

    def _prepared(self, batch: Any, dataloader_idx: int) -> Any:
        batch = self._trainer.precision_plugin.convert_input(batch)
        return self._trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)

    def _has(self, hooks: tuple[str, ...]) -> bool:
        """Whether the user has one of them by now: they may be given in the middle of an epoch."""
        holders = (self._trainer.lightning_module, getattr(self._trainer, "datamodule", None))
        return any(replaces(one, name) for one in holders if one is not None for name in hooks)
