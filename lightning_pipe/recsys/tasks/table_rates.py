"""Learning rates of the tables in training: from a separate schedule, or following the dense optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from lightning_pipe.recsys.dense.dense_optimizer import base_learning_rate, learning_rate_factor
from lightning_pipe.recsys.kernels.table_lr_scheduler import TableLRScheduler
from lightning_pipe.recsys.sharding.sharded_model import ShardedModel


class TableLearningRates:
    """Copies the current learning rates into the tables' fused optimizers."""

    def __init__(
        self, sharded: ShardedModel, optimizer: Callable[[], Optimizer], schedule: Mapping[str, Any] | None
    ) -> None:
        self._sharded = sharded
        self._optimizer = optimizer
        self._base: float | None = None
        # The optimizer has no groups if configure_optimizers returned nothing.
        if optimizer().param_groups:
            base = base_learning_rate(optimizer())
            # A search has scaled the rates of tables as well, so they keep the ratio to the rate that it found.
            self._base = sharded.searched_rates.get(base, base)
        rates = {name: table.learning_rate for name, table in sharded.tables.items() if not table.is_frozen}
        self.schedule = None if schedule is None else TableLRScheduler(schedule, rates)

    def apply(self) -> None:
        """Copy the current rates."""
        if self.schedule is not None:
            self._sharded.set_learning_rates(self.schedule.learning_rates())
        elif (optimizer := self._optimizer()).param_groups:
            self._sharded.set_learning_rate_factor(learning_rate_factor(optimizer, self._base))

    def record_found_lr(self, rate: float) -> None:
        """Note that a search has found *rate* for the dense optimizer, for later trainings that begin with it."""
        if self._base is not None:
            self._sharded.searched_rates[rate] = self._base

    def step(self) -> None:
        """Advance the schedule by one optimizer step."""
        if self.schedule is not None:
            self.schedule.step()
