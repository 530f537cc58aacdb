"""The user's hooks that a batch passes on its way to the device, each kind drawing from a random stream of its own.

Tested in ``tests/scenarios/trainer/test_hook_order.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipe.loops.data.random_streams import RandomStreams, Stream
from lightning_pipe.loops.programs.hook_calls import is_watched

_PREPARES = ("on_before_batch_transfer",)
_TRANSFERS = ("transfer_batch_to_device", "on_after_batch_transfer")


class BatchHooks:
    """Calls them on the main thread, as Lightning's loops do.

    Args:
        trainer: whose module, data module and strategy have them.
        streams: what they draw from. Where no hook of the user's is called nothing draws, and nothing is switched.
    """

    def __init__(self, trainer: pl.Trainer, streams: RandomStreams) -> None:
        self._trainer = trainer
        self._streams = streams
        self._draws = {"prepare": self._overrides(_PREPARES), "transfer": self._overrides(_TRANSFERS)}
        self._device = trainer.strategy.root_device
        self._gives_back = not self._draws["prepare"] and self._is_lightnings(
            trainer.precision_plugin, Precision, "convert_input"
        )
        self._moves = (
            not self._draws["transfer"]
            and self._is_lightnings(trainer.strategy, Strategy, "batch_to_device")
            and self._is_lightnings(trainer.lightning_module, pl.LightningModule, "_apply_batch_transfer_handler")
        )

    def prepare(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """What is done before a batch is moved."""
        if self._gives_back and not is_watched(self._trainer):
            return batch
        return self._drawing("prepare", partial(self._prepared, batch, dataloader_idx))

    def move(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device, with what is done there."""
        if self._moves and not is_watched(self._trainer):
            return move_data_to_device(batch, self._device)
        move = partial(call._call_strategy_hook, self._trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx)
        return self._drawing("transfer", move)

    def _prepared(self, batch: Any, dataloader_idx: int) -> Any:
        batch = self._trainer.precision_plugin.convert_input(batch)
        return self._trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)

    def _drawing(self, stream: Stream, work: Callable[[], Any]) -> Any:
        if not self._draws[stream]:
            return work()
        return self._streams.draw(stream, work)

    @staticmethod
    def _is_lightnings(holder: Any, base: type, name: str) -> bool:
        """Whether a method is Lightning's own, which does nothing that is not done here."""
        return getattr(type(holder), name) is getattr(base, name) and name not in vars(holder)

    def _overrides(self, hooks: tuple[str, ...]) -> bool:
        datamodule = getattr(self._trainer, "datamodule", None)
        holders = [one for one in (self._trainer.lightning_module, datamodule) if one is not None]
        return any(is_overridden(name, holder) for name in hooks for holder in holders)
