"""Hooks are called as Lightning calls them, and what nobody listens to is not called."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.core import module as module_file
from lightning.pytorch.loops import training_epoch_loop
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer import call
from torch.utils.data import DataLoader

from lightning_pipe.loops import PipelineTrainingEpochLoop
from lightning_pipe.loops.programs.hook_calls import quick_hook_calls

PLACES = [
    (call, "_call_callback_hooks"),
    (call, "_call_lightning_module_hook"),
    (call, "_call_strategy_hook"),
    (module_file, "is_param_in_hook_signature"),
    (training_epoch_loop, "is_param_in_hook_signature"),
]


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
    def on_before_backward(self, loss: torch.Tensor) -> None:
        self.heard.append(("on_before_backward", self._current_fx_name))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.heard.append(("on_after_batch_transfer", self._current_fx_name))
        return batch * 2


class Callback(pl.Callback):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.heard.append(("start", batch_idx, pl_module._current_fx_name))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.heard.append(("end", batch_idx, pl_module._current_fx_name, float(outputs["loss"])))


def trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **options,
    )


def fit(module: Model, *callbacks: pl.Callback, ours: bool = True, **options: Any) -> pl.Trainer:
    made = trainer(*callbacks, **options)
    if ours:
        PipelineTrainingEpochLoop.install(made)
    torch.manual_seed(0)
    with torch.no_grad():
        module.layer.weight.fill_(0.5)
        module.layer.bias.fill_(0.25)
    data: Any = list(torch.arange(6.0).view(3, 1, 2))
    made.fit(module, DataLoader(data, batch_size=None))
    return made


@pytest.fixture(autouse=True)
def lightnings_own() -> Iterator[None]:
    before = [getattr(place, name) for place, name in PLACES]
    yield
    assert [getattr(place, name) for place, name in PLACES] == before, "Lightning's functions were not put back"


def test_while_it_lasts_others_do_it_and_then_lightnings_own() -> None:
    before = [getattr(place, name) for place, name in PLACES]
    with quick_hook_calls():
        within = [getattr(place, name) for place, name in PLACES]
        with quick_hook_calls():
            pass
        assert [getattr(place, name) for place, name in PLACES] == within
    assert not set(map(id, before)) & set(map(id, within))


def test_they_are_put_back_after_an_error() -> None:
    with pytest.raises(KeyError), quick_hook_calls():
        raise KeyError


def test_somebody_elses_in_their_place_stays() -> None:
    other = mock.Mock()
    with mock.patch.object(call, "_call_strategy_hook", other), quick_hook_calls():
        assert call._call_strategy_hook is other
    with quick_hook_calls(), mock.patch.object(call, "_call_strategy_hook", other):
        pass


@pytest.mark.parametrize("make", [Model, Listens])
def test_who_listens_hears_the_same_as_in_lightnings_loop(make: type[Model]) -> None:
    heard = []
    for ours in (False, True):
        module, callback = make(), Callback()
        fit(module, callback, ours=ours)
        heard.append((callback.heard, sorted(module.heard), module.layer.weight.tolist()))
    assert heard[0] == heard[1]
    assert len(heard[0][0]) == 6


def test_who_begins_to_listen_in_mid_epoch_is_heard() -> None:
    late = Callback()

    class Adds(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 0:
                trainer.callbacks.append(late)
                pl_module.on_before_backward = lambda loss: pl_module.heard.append("patched")

    module = Model()
    fit(module, Adds())
    assert [one[:2] for one in late.heard] == [("end", 0), ("start", 1), ("end", 1), ("start", 2), ("end", 2)]
    assert module.heard.count("patched") == 2


def test_a_patched_base_class_is_heard() -> None:
    with mock.patch.object(pl.Callback, "on_train_batch_start") as patched:
        fit(Model(), pl.Callback())
    assert patched.call_count == 3


def test_an_empty_method_is_not_called() -> None:
    class Counts(pl.Callback):
        asked = 0

        def __getattribute__(self, name: str) -> Any:
            if name == "on_before_zero_grad":
                type(self).asked += 1
            return super().__getattribute__(name)

    fit(Model(), Counts())
    assert Counts.asked == 0


def test_callbacks_that_monitor_are_called_apart_from_the_others() -> None:
    heard: list[str] = []

    class Notes(pl.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            heard.append(type(self).__name__)

    class Monitors(Notes, Checkpoint):
        pass

    trainer = pl.Trainer(accelerator="cpu", callbacks=[Monitors(), Notes()], logger=False, enable_progress_bar=False)
    for which, expected in ((None, ["Notes", "Monitors"]), (False, ["Notes"]), (True, ["Monitors"])):
        heard.clear()
        with quick_hook_calls():
            call._call_callback_hooks(trainer, "on_train_epoch_end", monitoring_callbacks=which)
        assert heard == expected


@pytest.mark.parametrize("watches", ["profiler", "debug"])
def test_a_profiler_and_debug_messages_have_every_call(watches: str, caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for ours in (False, True):
        caplog.clear()
        profiler = SimpleProfiler()
        with caplog.at_level(logging.DEBUG if watches == "debug" else logging.WARNING, logger=call.__name__):
            fit(Model(), pl.Callback(), ours=ours, **({"profiler": profiler} if watches == "profiler" else {}))
        if watches == "profiler":
            found.append({name: len(times) for name, times in profiler.recorded_durations.items()})
        else:
            found.append(dict.fromkeys(sorted(record.message for record in caplog.records), 1))
    hooks = [{name: count for name, count in one.items() if "Callback" in name or "hook" in name} for one in found]
    assert hooks[0] == hooks[1]
    assert any("on_before_zero_grad" in name for name in hooks[0])


@pytest.mark.parametrize("clip", [None, 0.1])
def test_gradients_are_clipped_where_they_are_to_be(clip: float | None) -> None:
    weights = []
    for ours in (False, True):
        module = Model()
        fit(module, ours=ours, gradient_clip_val=clip)
        weights.append(module.layer.weight.tolist())
    assert weights[0] == weights[1]


def test_a_clipping_of_the_users_is_called_without_a_value_too() -> None:
    class Clips(Model):
        def configure_gradient_clipping(self, optimizer: Any, *values: Any, **named: Any) -> None:
            self.heard.append("clipped")

    module = Clips()
    fit(module)
    assert module.heard.count("clipped") == 3


def test_the_signature_of_a_step_is_looked_at_once() -> None:
    class Bare(Model):
        def training_step(self, batch: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return super().training_step(batch, 0)

    looked: dict[bool, int] = {}
    for ours in (False, True):
        with mock.patch("inspect.getfullargspec", side_effect=inspect.getfullargspec) as looks:
            fit(Bare(), ours=ours)
        looked[ours] = looks.call_count
    # Of three batches.
    assert looked[False] - looked[True] == 2
