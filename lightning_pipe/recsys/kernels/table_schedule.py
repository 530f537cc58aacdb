"""Learning-rate schedule of the tables only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.kernels.table_optimizer import named_class


class TableSchedule:
    """Runs a PyTorch scheduler over the base rates of the tables, whose optimisers are inside fused kernels.

    Args:
        config: ``class_path`` of an ``LRScheduler``, and ``init_args`` with its arguments except the optimiser.
        base_rates: table name to learning rate.

    Raises:
        SetupError: *config* has other keys, the class does not exist, does not accept the arguments, or steps on a
            metric.
    """

    def __init__(self, config: Mapping[str, Any], base_rates: Mapping[str, float]) -> None:
        path = config.get("class_path") if isinstance(config, Mapping) else None
        if not isinstance(path, str) or set(config) - {"class_path", "init_args"}:
            raise SetupError(
                f"sparse_lr_scheduler must be a mapping with class_path (of a scheduler, such as"
                f" torch.optim.lr_scheduler.StepLR) and, if the class takes arguments, init_args, got {config!r}. Set"
                " these keys only."
            )
        use = "the full path of an LRScheduler, such as torch.optim.lr_scheduler.StepLR"
        scheduler_class = named_class("sparse_lr_scheduler", path, use)
        if not (isinstance(scheduler_class, type) and issubclass(scheduler_class, LRScheduler)):
            raise SetupError(
                f"class_path of sparse_lr_scheduler must be an LRScheduler, got {path!r}. Use one of"
                " torch.optim.lr_scheduler."
            )
        if issubclass(scheduler_class, ReduceLROnPlateau):
            raise SetupError(
                f"sparse_lr_scheduler has class_path {path!r}, which steps on a metric, but the tables' schedule steps"
                " after every optimiser step. Use a scheduler that counts steps."
            )
        # PyTorch's schedulers change the groups of an optimiser, so an optimiser that trains nothing holds the rates.
        self._tables = list(base_rates)
        self._holder = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": rate} for rate in base_rates.values()])
        try:
            self._scheduler = scheduler_class(self._holder, **dict(config.get("init_args") or {}))
        except (TypeError, ValueError) as error:
            raise SetupError(
                f"sparse_lr_scheduler: {path} does not accept init_args {config.get('init_args')} ({error}). Compare"
                " them with its signature."
            ) from error

    def step(self) -> None:
        """Advance the schedule by one optimiser step."""
        self._holder.step()  # avoids PyTorch's warning of a schedule stepped before its optimiser; has no gradients
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
