"""``Trainer(strategy="in_process_pipeline")``: one process, several partitions, Lightning around them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipe.engine import PlanError, SetupError
from lightning_pipe.pipe import Pipe, compute_pipe_or_module_loss
from lightning_pipe.strategies import InProcessPipelineStrategy
from tests.loops.models import trainer as quiet_trainer
from tests.pipe.models import MODELS, same, whole_forward, with_skips
from tests.rounding import Reference

CHUNKS = 3


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Model(pl.LightningModule):
    """Ordinary, but for a forward in micro-batches where there is no pipe: to be compared with one."""

    def __init__(self, name: str = "with_skips") -> None:
        super().__init__()
        self.model = MODELS[name]()
        self.scale = nn.Parameter(torch.ones(()))
        self.losses: list[float] = []
        self.seen: list[Any] = []

    def forward(self, inputs: Tensor) -> Tensor:
        if isinstance(self.model, Pipe):
            output: Tensor = self.model(inputs)
        else:
            output = whole_forward(self.model, inputs, CHUNKS)
        return output * self.scale

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self(inputs), targets)
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self(inputs), targets))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def data(batch_size: int = 6, rows: int = 20) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)), batch_size
    )


def trainer(strategy: Any = None, devices: int = 2, **options: Any) -> pl.Trainer:
    chosen = strategy or InProcessPipelineStrategy(CHUNKS)
    return quiet_trainer(**{"devices": devices, "strategy": chosen, "log_every_n_steps": 1, **options})


def alone(**options: Any) -> pl.Trainer:
    return trainer("auto", 1, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"precision": "bf16-mixed"},
    ],
    ids=str,
)
def test_a_fit_equals_lightnings_on_the_same_micro_batches(options: dict[str, Any]) -> None:
    mine, theirs = Model(), Model()
    used, other = trainer(**options), alone(**options)
    used.fit(mine, data(), data())
    other.fit(theirs, data(), data())
    assert mine.losses == theirs.losses
    assert same(mine.state_dict(), theirs.state_dict())
    assert used.callback_metrics == other.callback_metrics
    assert used.world_size == 1
    assert used.strategy.launcher is None


def test_the_sequential_comes_back_and_no_thread_is_left() -> None:
    model = Model()
    sequential, keys = model.model, [*model.state_dict()]
    trainer(max_epochs=1).fit(model, data())
    assert model.model is sequential
    assert [*model.state_dict()] == keys
    assert sequential(torch.randn(2, 6)).shape == (2, 3)
    assert not [thread for thread in threading.enumerate() if "partition" in thread.name]


def test_evaluation_equals_lightnings() -> None:
    mine, theirs = Model(), Model()
    used, other = trainer(), alone()
    for call in ("validate", "test"):
        assert getattr(used, call)(mine, data(), verbose=False) == getattr(other, call)(theirs, data(), verbose=False)
    assert same(used.predict(mine, data()), other.predict(theirs, data()))


def test_a_loss_inside_trains_like_one_outside() -> None:
    class Inside(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            inputs, targets = batch
            loss = compute_pipe_or_module_loss(self.model, inputs, targets, nn.MSELoss())
            self.losses.append(loss.item())
            return loss

    def trained(used: pl.Trainer) -> dict[str, Any]:
        model = Inside()
        used.fit(model, data())
        return {"losses": model.losses, **model.state_dict()}

    for options in ({}, {"accumulate_grad_batches": 2}):
        # On one device compute_pipe_or_module_loss has one micro-batch.
        expected = Reference.of(partial(lambda options: trained(alone(**options)), options))
        assert expected.differences(trained(trainer(**options))) == []


def test_a_checkpoint_goes_on_under_either_strategy(tmp_path: Path) -> None:
    whole = Model()
    trainer(max_epochs=2).fit(whole, data())
    saving = ModelCheckpoint(tmp_path, save_last=True)
    trainer(max_epochs=1, enable_checkpointing=True, callbacks=[saving]).fit(Model(), data())
    for used in (trainer(max_epochs=2), alone(max_epochs=2)):
        model = Model()
        used.fit(model, data(), ckpt_path=str(tmp_path / "last.ckpt"))
        assert same(model.state_dict(), whole.state_dict())
    loaded = Model.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert isinstance(loaded.model, nn.Sequential)


def test_the_last_element_of_a_tuple_goes_to_the_last_device_and_hooks_see_the_batch() -> None:
    class Pair(NamedTuple):
        inputs: Any
        targets: Any

    class Hooked(Model):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.seen.append("before")
            return Pair(*batch)

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.seen.append(type(batch).__name__)
            return batch

    model = Hooked()
    trainer(max_epochs=1, limit_train_batches=1).fit(model, data())
    assert model.seen == ["before", "Pair"]

    moved: list[tuple[Any, str]] = []

    class OnDevices(InProcessPipelineStrategy):
        """Of devices that are not there, to see where parts of a batch would go."""

    strategy = OnDevices(parallel_devices=["cpu", "meta"])
    for batch in ((torch.ones(2), torch.ones(2), torch.ones(2)), [torch.ones(2), {"a": torch.ones(2)}]):
        parts = strategy._place_batch_on_devices(batch)
        moved.append(
            (type(parts), parts[-1]["a"].device.type if isinstance(parts[-1], dict) else parts[-1].device.type)
        )
        assert all(part.device.type == "cpu" for part in parts[:-1])
    assert moved == [(tuple, "meta"), (list, "meta")]
    assert strategy._place_batch_on_devices({"x": torch.ones(2)})["x"].device.type == "cpu"
    assert strategy._place_batch_on_devices((torch.ones(2),))[0].device.type == "cpu"


def test_a_batch_goes_where_the_module_says() -> None:
    class Says(Model):
        def place_batch(self, batch: Any, devices: list[torch.device]) -> Any:
            self.seen.append(devices)
            return batch

    model = Says()
    trainer(max_epochs=1, limit_train_batches=2).fit(model, data())
    assert model.seen == [[torch.device("cpu")] * 2] * 2


def test_the_sequential_may_have_another_name_or_be_inside_another_module() -> None:
    class Deep(Model):
        pipe_module = "body.layers"

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Module()
            self.body.layers = with_skips()
            del self.model

        def forward(self, inputs: Tensor) -> Tensor:
            assert isinstance(self.body.layers, Pipe)
            output: Tensor = self.body.layers(inputs)
            return output * self.scale

    trainer(max_epochs=1).fit(Deep(), data())
    trainer(InProcessPipelineStrategy(2, pipe_module="body.layers"), max_epochs=1).fit(Deep(), data())


def test_what_is_no_sequential_is_refused_with_what_there_is() -> None:
    class Wrong(Model):
        pipe_module = "scale"

    with pytest.raises(SetupError, match=r"'scale' of Wrong is a Parameter; .* Set pipe_module to one of 'model'"):
        trainer().fit(Wrong(), data())
    own = Model()
    own.model = pipe = cast(Any, Pipe(own.model, 2, devices=["cpu"]))
    with pytest.raises(SetupError, match=r"'model' of Model is a Pipe; .* Assign the nn.Sequential to 'model'"):
        trainer().fit(own, data())
    pipe.close()
    other = Model()
    other.model = cast(Any, nn.Linear(4, 4))
    with pytest.raises(SetupError, match=r"'model' of Model is a Linear; .* Put the layers to split into an nn.Seq"):
        trainer().fit(other, data())
    model = Model()
    with pytest.raises(SetupError, match=r"Model has no 'there.is'; expected an nn.Sequential"):
        trainer(InProcessPipelineStrategy(pipe_module="there.is")).fit(model, data())
    with pytest.raises(PlanError, match=r"balance is \[1, 2, 5\]"):
        trainer(InProcessPipelineStrategy(balance=[1, 2, 5])).fit(model, data())
    assert isinstance(model.model, nn.Sequential)  # as it was
    with pytest.raises(PlanError, match="chunks is 0"):
        InProcessPipelineStrategy(0)
    for options, message in (
        ({"deferred_batch_norm": "no"}, "deferred_batch_norm is 'no'; expected True or False"),
        ({"compile_partitions": 1}, "compile_partitions is 1; expected True or False"),
    ):
        with pytest.raises(SetupError, match=message):
            InProcessPipelineStrategy(2, **options)
    with pytest.raises(SetupError, match="has no pipe before set-up"):
        _ = InProcessPipelineStrategy().pipe


def test_several_machines_are_refused() -> None:
    with pytest.raises(SetupError, match="num_nodes is 2; expected 1, since a pipe is one process"):
        trainer(num_nodes=2)


def test_what_was_frozen_stays_so_and_deferred_batch_normalizations_are_gone_behind_a_fit() -> None:
    for deferred in (False, True):
        model = Model("plain")
        norm, inner = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        holder = nn.Sequential(inner)
        model.model = nn.Sequential(nn.Linear(6, 6), norm, nn.Dropout(0.5).eval(), holder, nn.Linear(6, 3))
        strategy = InProcessPipelineStrategy(2, deferred_batch_norm=deferred, parallel_devices=["cpu", "cpu"])
        trainer(strategy, max_epochs=1).fit(model, data(rows=18))
        assert model.model[1] is norm
        assert holder[0] is inner
        assert norm.num_batches_tracked == (3 if deferred else 6)
        assert [layer.training for layer in model.model] == [True, True, False, True, True]


def test_an_error_in_a_layer_ends_the_fit_with_its_place() -> None:
    model = Model("plain")

    class Fails(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            raise ArithmeticError("on purpose")

    model.model[3] = Fails()
    with pytest.raises(ArithmeticError) as raised:
        trainer().fit(model, data())
    assert any("micro-batch 0 of 3" in note for note in raised.value.__notes__)
    assert isinstance(model.model, nn.Sequential)
    assert not [thread for thread in threading.enumerate() if "partition" in thread.name]
