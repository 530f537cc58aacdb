"""Learning-rate schedule of the tables only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.kernels.table_optimizer import parse_class_config


class TableLRScheduler:
    """Runs a PyTorch scheduler over the base rates of the tables, whose optimizers are inside fused kernels."""

    def __init__(self, config: Mapping[str, Any], base_rates: Mapping[str, float]) -> None:
        example = "torch.optim.lr_scheduler.StepLR"
        scheduler_class, arguments = parse_class_config("sparse_lr_scheduler", config, LRScheduler, example)
        if issubclass(scheduler_class, ReduceLROnPlateau):
            raise SetupError(
                f"sparse_lr_scheduler has class_path {config['class_path']!r}, which steps on a metric, but the tables'"
                " schedule steps after every optimizer step. Use a scheduler that counts steps."
            )
        # PyTorch's schedulers change the groups of an optimizer, so an optimizer that trains nothing holds the rates.
        self._tables = list(base_rates)
        self._holder = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": rate} for rate in base_rates.values()])
        try:
            self._scheduler = scheduler_class(self._holder, **arguments)
        except (TypeError, ValueError) as error:
            raise SetupError(
                f"sparse_lr_scheduler: {config['class_path']} does not accept init_args {arguments} ({error}). Compare"
                " them with its signature."
            ) from error

    def step(self) -> None:
        """Advance the schedule by one optimizer step."""
        self._holder.step()  # avoids PyTorch's warning of a schedule stepped before its optimizer; has no gradients
        self._scheduler.step()

    def learning_rates(self) -> dict[str, float]:
        """Return each table's current rate."""
        return {table: float(group["lr"]) for table, group in zip(self._tables, self._holder.param_groups, strict=True)}

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the schedule, for a checkpoint."""
        return {"scheduler": self._scheduler.state_dict(), "rates": self.learning_rates()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position from :meth:`state_dict`."""
        self._scheduler.load_state_dict(dict(state["scheduler"]))
        for table, group in zip(self._tables, self._holder.param_groups, strict=True):
            group["lr"] = state["rates"][table]
