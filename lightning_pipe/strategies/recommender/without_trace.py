"""Calls of a module's ``training_step`` without effect on logged values, metrics and random generators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torchmetrics import Metric

from lightning_pipe._compat.lightning import ResultCollection
from lightning_pipe.engine.runtime.captured import Captured, capture
from lightning_pipe.loops.data.random_streams import get_states, set_states


@contextmanager
def leaving_no_trace(trainer: pl.Trainer, module: pl.LightningModule, device: torch.device) -> Iterator[None]:
    """Context in which ``training_step`` may be called between two batches. Values that it logs are discarded.

    States of metrics and random generators are restored. Other state of the module is not.
    """
    loop, connector = trainer.fit_loop.epoch_loop, trainer._logger_connector
    before = loop._results, connector._current_fx, connector._first_loop_iter, module._current_fx_name
    metrics = [one for one in module.modules() if isinstance(one, Metric)]
    states = [_state_of(one) for one in metrics]
    generators = get_states(device)
    loop._results = ResultCollection(training=True)
    connector._first_loop_iter = True
    module._current_fx_name = "training_step"
    try:
        yield
    finally:
        loop._results, connector._current_fx, connector._first_loop_iter, module._current_fx_name = before
        for metric, state in zip(metrics, states, strict=True):
            metric.__dict__.update(state.give())
        set_states(generators, device)


def _state_of(metric: Metric) -> Captured:
    names = (*metric._defaults, "_update_count", "_computed", "_forward_cache")
    state: dict[str, Any] = {name: getattr(metric, name) for name in names}
    return capture(state)
