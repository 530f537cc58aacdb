"""Contracts with Lightning: the methods that loops override or call are there, and take the same arguments.

What is done with less work than in Lightning does the same.

A failure of the table means that Lightning has changed: compare the loops in ``lightning_pipe/loops/`` with Lightning's
new ones, then correct the table below.
"""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_pipe._compat import fast_hooks, lightning
from lightning_pipe.loops import PipelineTrainingEpochLoop

# Each with its arguments after self.
ARGUMENTS = [
    ("TrainingEpochLoop.advance", "data_fetcher"),
    ("TrainingEpochLoop.on_advance_end", "data_fetcher"),
    ("TrainingEpochLoop.on_run_start", "data_fetcher"),
    ("TrainingEpochLoop.reset", ""),
    ("TrainingEpochLoop.run", "data_fetcher"),
    ("TrainingEpochLoop.teardown", ""),
    ("TrainingEpochLoop._build_kwargs", "kwargs batch batch_idx"),
    ("TrainingEpochLoop._num_ready_batches_reached", ""),
    ("TrainingEpochLoop._should_check_val_fx", "data_fetcher"),
    ("TrainingEpochLoop.update_lr_schedulers", "interval update_plateau_schedulers"),
    ("EvaluationLoop.reset", ""),
    ("EvaluationLoop.run", "args kwargs"),
    ("EvaluationLoop.setup_data", ""),
    ("EvaluationLoop._build_kwargs", "batch batch_idx dataloader_idx"),
    ("EvaluationLoop._build_step_args_from_hook_kwargs", "hook_kwargs step_hook_name"),
    ("EvaluationLoop._evaluation_step", "batch batch_idx dataloader_idx dataloader_iter"),
    ("EvaluationLoop._on_evaluation_end", "args kwargs"),
    ("EvaluationLoop._store_dataloader_outputs", ""),
    ("PredictionLoop.reset", ""),
    ("PredictionLoop.run", "args kwargs"),
    ("PredictionLoop.setup_data", ""),
    ("PredictionLoop._build_kwargs", "batch batch_idx dataloader_idx"),
    ("PredictionLoop._build_step_args_from_hook_kwargs", "hook_kwargs step_hook_name"),
    ("PredictionLoop._predict_step", "batch batch_idx dataloader_idx dataloader_iter"),
    ("PredictionLoop._store_data_for_prediction_writer", "batch_idx dataloader_idx"),
    ("FitLoop.on_run_start", ""),
    ("FitLoop.reset", ""),
    ("FitLoop.setup_data", ""),
    ("FitLoop._load_combined_loader_states", ""),
    ("FitLoop._should_accumulate", ""),
    ("AutomaticOptimization.run", "optimizer batch_idx kwargs"),
    ("AutomaticOptimization._make_backward_fn", "optimizer"),
    ("AutomaticOptimization._make_closure", "kwargs optimizer batch_idx"),
    ("AutomaticOptimization._make_step_fn", "kwargs"),
    ("AutomaticOptimization._make_zero_grad_fn", "batch_idx optimizer"),
    ("AutomaticOptimization._on_before_zero_grad", "optimizer"),
    ("AutomaticOptimization._optimizer_step", "batch_idx train_step_and_backward_closure"),
    ("AutomaticOptimization._optimizer_zero_grad", "batch_idx optimizer"),
    ("_SignalConnector._sigterm_notifier_fn", "signum _"),
    ("ResultMetric.__init__", "metadata is_tensor"),
    ("ResultMetric.update", "value batch_size"),
    ("ResultMetric.to", "args kwargs"),
    ("ResultCollection.__init__", "training"),
    ("call._call_callback_hooks", "trainer hook_name args monitoring_callbacks kwargs"),
    ("call._call_lightning_module_hook", "trainer hook_name args pl_module kwargs"),
    ("call._call_strategy_hook", "trainer hook_name args kwargs"),
    ("set_sampler_epoch", "dataloader epoch"),
]


@pytest.mark.parametrize(("name", "arguments"), ARGUMENTS)
def test_lightnings_loops_have_the_methods_that_ours_override_or_call(name: str, arguments: str) -> None:
    function = attrgetter(name)(fast_hooks if name.startswith("call.") else lightning)
    found = [one for one in inspect.signature(function).parameters if one != "self"]
    assert found == arguments.split(), f"Lightning's {name} takes {found}, expected {arguments.split()}"


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.heard: list[Any] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.heard.append(("training_step", self._current_fx_name))
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Listens(Model):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.heard.append(("on_before_zero_grad", self._current_fx_name))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.heard.append(("optimizer_step", self._current_fx_name))
        super().optimizer_step(*args, **kwargs)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.heard.append(("on_after_batch_transfer", self._current_fx_name))
        return batch * 2


class Notes(pl.Callback):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.heard.append(("start", batch_idx, pl_module._current_fx_name))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.heard.append(("end", batch_idx, pl_module._current_fx_name, float(outputs["loss"])))


def fit(module: Model, *callbacks: pl.Callback, ours: bool = True, **options: Any) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )
    if ours:
        PipelineTrainingEpochLoop.install(trainer)
    with torch.no_grad():
        module.layer.weight.fill_(0.5)
        module.layer.bias.fill_(0.25)
    data: Any = list(torch.arange(6.0).view(3, 1, 2))
    trainer.fit(module, DataLoader(data, batch_size=None))


@pytest.mark.parametrize("make", [Model, Listens])
def test_who_listens_hears_the_same_as_in_lightnings_loop(make: type[Model]) -> None:
    heard = []
    for ours in (False, True):
        module, callback = make(), Notes()
        fit(module, callback, ours=ours)
        heard.append((callback.heard, sorted(module.heard), module.layer.weight.tolist()))
    assert heard[0] == heard[1]
    assert len(heard[0][0]) == 6


def test_who_begins_to_listen_in_mid_epoch_is_heard() -> None:
    late = Notes()

    class Adds(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                trainer.callbacks.append(late)
                pl_module.on_before_zero_grad = lambda optimizer: pl_module.heard.append("patched")

    module = Model()
    fit(module, Adds())
    assert [one[:2] for one in late.heard] == [("end", 0), ("start", 1), ("end", 1), ("start", 2), ("end", 2)]
    assert module.heard.count("patched") == 2


def test_hooks_of_the_transfer_are_heard_from_where_they_are_given() -> None:
    class Adds(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                move = trainer.strategy.batch_to_device
                trainer.strategy.batch_to_device = lambda *args, **kwargs: (
                    pl_module.heard.append("moved") or move(*args, **kwargs)
                )
                pl_module.on_before_batch_transfer = lambda batch, dataloader_idx: batch + 1

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            pl_module.heard.append(batch.tolist())

    module = Model()
    fit(module, Adds())
    # The second batch was prepared and moved before.
    steps = [one for one in module.heard if not isinstance(one, tuple)]
    assert steps == [[[0.0, 1.0]], "moved", [[2.0, 3.0]], [[5.0, 6.0]]]


@pytest.mark.parametrize("of", ["a callback", "the module", "the module's backward"])
def test_who_changes_the_loss_before_the_backward_does_not_change_what_the_step_returned(of: str) -> None:
    class Keeps(Model):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.loss = super().training_step(batch, batch_idx)
            self.heard.append(self.loss.item())
            return self.loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.heard.append(self.loss.item())

    class Doubles(Keeps):
        def on_before_backward(self, loss: torch.Tensor) -> None:
            loss.mul_(2)

    class DoublesInBackward(Keeps):
        def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            loss.mul_(2).backward()

    class Listener(pl.Callback):
        def on_before_backward(self, trainer: Any, pl_module: Any, loss: torch.Tensor) -> None:
            loss.mul_(2)

    makes = {"a callback": Keeps, "the module": Doubles, "the module's backward": DoublesInBackward}
    heard = []
    for ours in (False, True):
        module = makes[of]()
        fit(module, *([Listener()] if of == "a callback" else []), ours=ours)
        heard.append((module.heard, module.layer.weight.tolist()))
    assert heard[0] == heard[1]


def test_an_empty_hook_is_not_called_and_the_signature_of_a_step_is_read_once() -> None:
    called: dict[bool, int] = {}
    read: dict[bool, int] = {}
    for ours in (False, True):
        reading = mock.patch("inspect.getfullargspec", side_effect=inspect.getfullargspec)
        with mock.patch.object(fast_hooks.call, "_call_callback_hooks") as calls, reading as reads:
            fit(Model(), ours=ours)
        called[ours] = sum(one.args[1] == "on_before_zero_grad" for one in calls.call_args_list)
        read[ours] = reads.call_count
    assert called == {False: 3, True: 0}
    assert read[False] - read[True] == 2


def results_of_one_value() -> Any:
    results = fast_hooks._QuickResults(training=True)
    results.log("training_step", "loss", torch.tensor(1.0), on_step=True, on_epoch=True)
    return results


def test_accumulators_move_to_the_values_device_where_they_are_not_there() -> None:
    metric = results_of_one_value()["training_step.loss"]
    assert metric.to(torch.device("cpu")) is metric
    assert metric.to(torch.device("meta")) is metric
    assert {metric.value.device.type, metric.cumulated_batch_size.device.type} == {"meta"}


def test_another_meaning_of_a_name_is_still_an_error() -> None:
    with pytest.raises(MisconfigurationException, match="different arguments"):
        results_of_one_value().log("training_step", "loss", torch.tensor(1.0), prog_bar=True)


def test_results_and_optimization_loops_of_another_class_stay_what_they_are() -> None:
    class Own(lightning.ResultCollection):
        pass

    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    loop = trainer.fit_loop.epoch_loop
    results = loop._results = Own(training=True)
    optimization = loop.automatic_optimization = mock.Mock()
    assert PipelineTrainingEpochLoop.install(trainer)._results is results
    assert trainer.fit_loop.epoch_loop.automatic_optimization is optimization


@pytest.mark.parametrize("normalize", [1, 3])
def test_a_loss_is_divided_where_that_changes_it(normalize: int) -> None:
    loss = torch.tensor(6.0, requires_grad=True)
    result = fast_hooks.FastAutomaticOptimization.output_result_cls.from_training_step_output(loss, normalize)
    assert (result.closure_loss is loss) == (normalize == 1)
    assert float(result.asdict()["loss"]) == 6.0 / normalize


def test_the_last_checkpoint_at_a_url_is_found_with_its_protocol() -> None:
    fs = MemoryFileSystem()
    fs.pipe("/of-a-contract/last.ckpt", b"marker")
    callback = ModelCheckpoint("memory://of-a-contract", save_last=True)
    trainer = pl.Trainer(callbacks=[callback], logger=False, enable_progress_bar=False, accelerator="cpu")
    lightning.patch_last_checkpoint_for_urls(trainer)
    lightning.patch_last_checkpoint_for_urls(trainer)
    assert callback._find_last_checkpoints(trainer) == {"memory:///of-a-contract/last.ckpt"}
    fs.rm("/of-a-contract", recursive=True)
