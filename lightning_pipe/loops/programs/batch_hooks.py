"""The user's hooks that a batch passes on its way to the device, each kind drawing from a random stream of its own.

Tested in ``tests/scenarios/trainer/test_hook_order.py``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipe._compat.lightning import call_strategy_hook, is_watched
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
        self._prepares = self._overrides(_PREPARES)
        self._transfers = self._overrides(_TRANSFERS)
        self._calls = self._transfers or type(trainer.strategy).batch_to_device is not Strategy.batch_to_device
        self._device = trainer.strategy.root_device

    def prepare(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """What is done before a batch is moved."""
        if self._prepares:
            return self._streams.draw("prepare", partial(self._prepared, batch, dataloader_idx))
        if is_watched(self._trainer):
            return self._prepared(batch, dataloader_idx)
        return self._trainer.precision_plugin.convert_input(batch)

    def move(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device, with what is done there."""
        if not (self._calls or is_watched(self._trainer)):
            return move_data_to_device(batch, self._device)
        move = partial(call_strategy_hook, self._trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx)
        return self._streams.draw("transfer", move) if self._transfers else move()

    def _prepared(self, batch: Any, dataloader_idx: int) -> Any:
        batch = self._trainer.precision_plugin.convert_input(batch)
        return self._trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)

    def _overrides(self, hooks: tuple[str, ...]) -> bool:
        datamodule = getattr(self._trainer, "datamodule", None)
        holders = [one for one in (self._trainer.lightning_module, datamodule) if one is not None]
        return any(is_overridden(name, holder) for name in hooks for holder in holders)
