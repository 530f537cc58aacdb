"""The user's hooks that a batch passes on its way to the device, each kind drawing from a random stream of its own.

Tested in ``tests/scenarios/trainer/test_hook_order.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_pipe._compat.lightning import call_strategy_hook
from lightning_pipe.loops.data.random_streams import RandomStreams, Stream

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

    def prepare(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """What is done before a batch is moved."""
        return self._drawing("prepare", partial(self._prepared, batch, dataloader_idx))

    def move(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device, with what is done there."""
        move = partial(call_strategy_hook, self._trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx)
        return self._drawing("transfer", move)

    def _prepared(self, batch: Any, dataloader_idx: int) -> Any:
        batch = self._trainer.precision_plugin.convert_input(batch)
        return self._trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)

    def _drawing(self, stream: Stream, work: Callable[[], Any]) -> Any:
        if not self._draws[stream]:
            return work()
        return self._streams.draw(stream, work)

    def _overrides(self, hooks: tuple[str, ...]) -> bool:
        datamodule = getattr(self._trainer, "datamodule", None)
        holders = [one for one in (self._trainer.lightning_module, datamodule) if one is not None]
        return any(is_overridden(name, holder) for name in hooks for holder in holders)
