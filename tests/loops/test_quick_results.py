"""What is logged and returned is what Lightning's own collection and closure have."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_pipe.loops import PipelineTrainingEpochLoop
from lightning_pipe.loops.quick_results import QuickClosureResult, QuickResults


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


def fit(ours: bool, accumulate: int, epochs: int = 2) -> Any:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=1,
    )
    if ours:
        PipelineTrainingEpochLoop.install(trainer)
    module = Logs()
    data: Any = list(torch.randn(5, 4, 2, generator=torch.Generator().manual_seed(1)))
    trainer.fit(module, DataLoader(data, batch_size=None))
    at_end = [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics]
    return module.seen, [numbers(one) for one in at_end], module.layer.weight.tolist()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_values_are_those_of_lightnings_loop(accumulate: int) -> None:
    ours, lightnings = fit(True, accumulate), fit(False, accumulate)
    assert ours == lightnings
    assert ours[0][-1]["loss"] > 0


def test_the_loops_results_are_quick_ones() -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    before = trainer.fit_loop.epoch_loop._results
    loop = PipelineTrainingEpochLoop.install(trainer)
    assert loop._results is before
    assert isinstance(loop._results, QuickResults)


def test_a_collection_of_another_class_stays_what_it_is() -> None:
    class Own(_ResultCollection):
        pass

    assert type(QuickResults.of(Own(training=True))) is Own


def test_accumulators_move_to_the_values_device_where_they_are_not_there() -> None:
    results = QuickResults(training=True)
    results.log("training_step", "loss", torch.tensor(1.0), on_step=True, on_epoch=True)
    metric = results["training_step.loss"]
    assert metric.to(torch.device("cpu")) is metric
    assert metric.to(torch.device("meta")) is metric
    assert {metric.value.device.type, metric.cumulated_batch_size.device.type} == {"meta"}


def test_what_is_known_of_a_value_is_not_copied_where_it_is_there() -> None:
    results = QuickResults(training=True)
    results.log("training_step", "loss", torch.tensor(1.0), on_step=True, on_epoch=True)
    meta = results["training_step.loss"].meta
    results.log("training_step", "loss", torch.tensor(2.0), on_step=True, on_epoch=True)
    assert results["training_step.loss"].meta is meta
    assert float(results["training_step.loss"].value) == 3.0


def test_another_meaning_of_a_name_is_still_an_error() -> None:
    results = QuickResults(training=True)
    results.log("training_step", "loss", torch.tensor(1.0))
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="different arguments"):
        results.log("training_step", "loss", torch.tensor(1.0), prog_bar=True)
    assert isinstance(results["training_step.loss"], _ResultMetric)


@pytest.mark.parametrize("normalize", [1, 3])
def test_a_loss_is_divided_where_that_changes_it(normalize: int) -> None:
    loss = torch.tensor(6.0, requires_grad=True)
    result = QuickClosureResult.from_training_step_output(loss, normalize)
    assert (result.closure_loss is loss) == (normalize == 1)
    assert float(result.asdict()["loss"]) == 6.0 / normalize


@pytest.mark.parametrize("output", ["text", {"other": 1}])
def test_what_is_no_loss_is_lightnings_error(output: Any) -> None:
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException):
        QuickClosureResult.from_training_step_output(output)
