"""What is logged, profiled and called in the pipelined loop is what Lightning's own loop logs, profiles and calls."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer import call
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_pipe.loops import PipelineTrainingEpochLoop


class Logs(pl.LightningModule):
    """Logs all kinds of values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)
        self.metric = MeanMetric()
        self.seen: list[dict[str, float]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("number", batch_idx, on_step=True)
        self.log("largest", loss, reduce_fx="max", on_epoch=True, on_step=False)
        self.log_dict({"sum": loss, "least": -loss}, reduce_fx="sum", on_epoch=True, on_step=False)
        self.metric(loss.detach())
        self.log("metric", self.metric, on_epoch=True, on_step=False)
        return {"loss": loss, "other": 1} if batch_idx == 1 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("at end", float(batch_idx))
        self.seen.append({**numbers(self.trainer.callback_metrics), "loss of output": float(outputs["loss"])})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def numbers(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def fit(module: pl.LightningModule, ours: bool, accumulate: int = 1, **options: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=1,
        **options,
    )
    if ours:
        PipelineTrainingEpochLoop.install(trainer)
    data: Any = list(torch.randn(5, 4, 2, generator=torch.Generator().manual_seed(1)))
    trainer.fit(module, DataLoader(data, batch_size=None))
    return trainer


@pytest.mark.parametrize("accumulate", [1, 2])
def test_logged_values_and_weights_are_those_of_lightnings_loop(accumulate: int) -> None:
    found = []
    for ours in (False, True):
        module = Logs()
        trainer = fit(module, ours, accumulate)
        at_end = [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]
        found.append((module.seen, [numbers(one) for one in at_end], module.layer.weight.tolist()))
    assert found[0] == found[1]
    assert found[0][0][-1]["loss"] > 0


@pytest.mark.parametrize("watches", ["profiler", "debug messages"])
def test_a_profiler_and_debug_messages_show_the_hook_calls_of_lightnings_loop(
    watches: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for ours in (False, True):
        caplog.clear()
        profiler = SimpleProfiler()
        options: dict[str, Any] = {"profiler": profiler} if watches == "profiler" else {}
        with caplog.at_level(logging.DEBUG if watches == "debug messages" else logging.WARNING, logger=call.__name__):
            fit(Logs(), ours, callbacks=[pl.Callback()], **options)
        if watches == "profiler":
            found.append({name: len(times) for name, times in profiler.recorded_durations.items()})
        else:
            found.append(dict(Counter(record.message for record in caplog.records)))
    hooks = [{name: count for name, count in one.items() if "Callback" in name or "hook" in name} for one in found]
    assert hooks[0] == hooks[1]
    assert any("on_before_zero_grad" in name for name in hooks[0])
