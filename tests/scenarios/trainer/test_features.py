"""What Lightning's Trainer and its callbacks offer works in the pipelined loop as in Lightning's own, to the bit."""

from __future__ import annotations

import csv
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    Checkpoint,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from lightning_pipe.loops import PipelineTrainingEpochLoop
from tests.loops.models import FEATURES as WIDTH
from tests.loops.models import Net, Rows, Stream, trainer

# ---------------------------------------------------------------------- modules


class Combined(Net):
    """Trains on what a CombinedLoader of two gives; one of them may have ended."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(torch.cat([part for part in batch.values() if part is not None]), batch_idx)


class TwoOptimizers(Net):
    """Two optimizers by hand, one of which steps every second time."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.second = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizers: Any = self.optimizers()
        one, other = optimizers
        loss = super().training_step(batch, batch_idx)
        one.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(one, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        one.step()
        self.toggle_optimizer(other)
        self.manual_backward(self.second(batch).square().mean())
        self.untoggle_optimizer(other)
        if batch_idx % 2:
            other.step()
            other.zero_grad()
            scheduler: Any = self.lr_schedulers()
            scheduler.step()

    def configure_optimizers(self) -> Any:
        one = torch.optim.Adam(self.layers.parameters(), lr=0.05)
        other = torch.optim.SGD(self.second.parameters(), lr=0.1, momentum=0.9)
        return [one, other], [torch.optim.lr_scheduler.StepLR(other, 1, 0.5)]


class Plateau(Net):
    """Its rate falls when a metric stays where it is."""

    interval = "epoch"

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        schedule = ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=10.0)
        monitor = "train_loss_epoch" if self.interval == "epoch" else "train_loss_step"
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": self.interval, "monitor": monitor, "frequency": 1},
        }


class PlateauOfSteps(Plateau):
    interval = "step"


class Normalized(Net):
    """Keeps statistics, which averaged weights are given anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Compiled(Net):
    """A part of it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.compile(self.layers, backend="aot_eager")  # type: ignore[assignment]


class Skipping(Net):
    """Skips the rest of every epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 4 else None


class Tuned(Net):
    """What a finder of learning rates changes."""

    lr = 0.05

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Failing(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if len(self.losses) == 9:
            raise KeyError("no such column")
        return super().training_step(batch, batch_idx)


class Epochs(Rows):
    """Other rows for every loader that is made of it."""

    made = 0

    def __init__(self) -> None:
        super().__init__(16)
        type(self).made += 1
        self.rows = self.rows * type(self).made


class Reloading(Net):
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Epochs(), 4, shuffle=True)


# ---------------------------------------------------------------------- features


def combined(mode: Any) -> Callable[[], CombinedLoader]:
    # A loader that begins again draws its seed: here from a stream of its own, in Lightning's loop from the model's.
    def loader(length: int) -> DataLoader[Tensor]:
        return DataLoader(Rows(length), 4, shuffle=True, generator=torch.Generator().manual_seed(length))

    return lambda: CombinedLoader({"a": loader(12), "b": loader(24)}, mode)


def streams() -> CombinedLoader:
    return CombinedLoader({"a": DataLoader(Stream(10), 4), "b": DataLoader(Stream(17), 4)}, "max_size")


def checkpoints(**arguments: Any) -> Callable[[], Callback]:
    return lambda: ModelCheckpoint(filename="{epoch}-{step}", **arguments)


def averaging() -> Callback:
    return StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=1)


@dataclass(frozen=True)
class Feature:
    """One run."""

    module: Callable[[], Any] = Net
    options: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callable[[], Callback], ...] = ()
    train: Callable[[], Any] | None = None
    raises: type[BaseException] | None = None
    batches: int = 18
    validations: int = 4
    checkpoints: int = 0


FEATURES: dict[str, Feature] = {
    "the shortest of two loaders": Feature(Combined, train=combined("min_size"), batches=9),
    "the longest of two loaders": Feature(Combined, train=combined("max_size")),
    "the longest of two loaders, the other again and again": Feature(Combined, train=combined("max_size_cycle")),
    "two loaders one after the other": Feature(
        Combined, train=combined("sequential"), raises=ValueError, batches=0, validations=1
    ),
    "a stream, some of it": Feature(lambda: Net(Stream(30)), {"limit_train_batches": 3}, batches=9),
    "a stream, validation every few batches": Feature(
        lambda: Net(Stream(30)), {"val_check_interval": 2}, batches=24, validations=13
    ),
    "limit_train_batches and limit_val_batches, numbers": Feature(
        options={"limit_train_batches": 5, "limit_val_batches": 2}, batches=15
    ),
    "no validation": Feature(options={"limit_val_batches": 0}, validations=0),
    "no training": Feature(options={"limit_train_batches": 0}, batches=0, validations=1),
    "overfit_batches, a part": Feature(options={"overfit_batches": 0.5}, batches=9),
    "validation as time goes by": Feature(
        options={"val_check_interval": "00:00:00:25", "check_val_every_n_epoch": None}, validations=7
    ),
    "validation across epochs": Feature(options={"val_check_interval": 5, "check_val_every_n_epoch": None}),
    "all of validation before training": Feature(options={"num_sanity_val_steps": -1}),
    "loaders made anew": Feature(Reloading, {"reload_dataloaders_every_n_epochs": 2}, batches=12),
    "a plateau of steps": Feature(PlateauOfSteps, {"accumulate_grad_batches": 2}),
    "the rest of an epoch skipped": Feature(Skipping, {"accumulate_grad_batches": 3}, batches=12, validations=1),
    "two optimizers by hand": Feature(TwoOptimizers),
    "detect_anomaly": Feature(options={"detect_anomaly": True, "gradient_clip_val": 0.1}),
    "64-true": Feature(options={"precision": "64-true"}),
    "bf16-mixed": Feature(options={"precision": "bf16-mixed", "accumulate_grad_batches": 2}),
    "a part compiled": Feature(Compiled, {"max_epochs": 1}, batches=6, validations=2),
    "checkpoints every few steps": Feature(
        callbacks=(checkpoints(every_n_train_steps=4, save_top_k=-1),), checkpoints=4
    ),
    "checkpoints of the best, and the last": Feature(
        options={"val_check_interval": 2},
        callbacks=(checkpoints(monitor="val_loss", save_top_k=2, save_last=True),),
        validations=10,
        checkpoints=3,
    ),
    "a stop when nothing gets better": Feature(
        options={"max_epochs": 6, "val_check_interval": 2},
        callbacks=(lambda: EarlyStopping("val_loss", min_delta=10.0, patience=3),),
        batches=8,
        validations=5,
    ),
    "max_time": Feature(options={"max_epochs": -1, "max_time": "00:00:01:35"}, batches=10, validations=3),
    "max_steps with accumulation": Feature(
        options={"max_epochs": -1, "max_steps": 5, "accumulate_grad_batches": 4}, batches=16, validations=3
    ),
    "a checkpoint on an exception": Feature(
        Failing, callbacks=(lambda: _OnException("."),), raises=KeyError, batches=9, validations=2, checkpoints=1
    ),
    "weights averaged, with statistics made anew": Feature(
        Normalized, {"max_epochs": 4}, callbacks=(averaging,), batches=30, validations=6
    ),
    "a moving average of weights": Feature(
        options={"val_check_interval": 2},
        callbacks=(lambda: EMAWeightAveraging(decay=0.9), checkpoints()),
        validations=10,
        checkpoints=1,
    ),
    "an average of weights over steps": Feature(
        options={"accumulate_grad_batches": 2}, callbacks=(lambda: WeightAveraging(),)
    ),
    "a learning rate looked for": Feature(
        Tuned, callbacks=(lambda: LearningRateFinder(num_training_steps=16, update_attr=True),), batches=34
    ),
}


class _OnException(OnExceptionCheckpoint):
    """In the folder of the trainer."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.dirpath = trainer.default_root_dir


class Validations(Callback):
    """After how many steps there was one."""

    def __init__(self) -> None:
        self.after: list[int] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.after.append(trainer.global_step)


# ---------------------------------------------------------------------- runs


class Clock:
    """Ten seconds pass with each batch trained, and none otherwise."""

    def __init__(self) -> None:
        self.module: Any = Net()

    def monotonic(self) -> float:
        return 10.0 * len(self.module.losses)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for name in ("loops.evaluation_loop", "loops.fit_loop", "loops.training_epoch_loop"):
        monkeypatch.setattr(f"lightning.pytorch.{name}.time", SimpleNamespace(monotonic=made.monotonic))
    for name in ("timer", "model_checkpoint"):
        monkeypatch.setattr(f"lightning.pytorch.callbacks.{name}.time", SimpleNamespace(monotonic=made.monotonic))
    return made


def train(
    feature: Feature, clock: Clock, root: Path, strategy: Any = "auto", pipelined: bool = False, val: Any = None
) -> tuple[pl.Trainer, dict[str, Any]]:
    """Run a feature."""
    Epochs.made = 0
    pl.seed_everything(3)
    module = clock.module = feature.module()
    loggers = [CSVLogger(root, name) for name in ("one", "two")]
    validated = Validations()
    callbacks = [validated, *(make() for make in feature.callbacks)]
    options = {"max_epochs": 3, "log_every_n_steps": 2, "default_root_dir": root, **feature.options}
    used = trainer(
        strategy=strategy,
        callbacks=callbacks,
        logger=loggers,
        enable_checkpointing=any(isinstance(one, Checkpoint) for one in callbacks),
        **options,
    )
    if pipelined:
        PipelineTrainingEpochLoop.install(used)
    if feature.train is not None:
        module.train_dataloader = feature.train
    module.val_dataloader = lambda: DataLoader(Rows(20), 4) if val is None else val
    with nullcontext() if feature.raises is None else pytest.raises(feature.raises):
        used.fit(module)
    assert isinstance(used.fit_loop.epoch_loop, PipelineTrainingEpochLoop) == (pipelined or strategy != "auto")
    # Equal to nothing would be equal too.
    left = sorted(path for path in root.rglob("*.ckpt"))
    counts = len(module.losses), len(validated.after), len(left)
    assert counts == (feature.batches, feature.validations, feature.checkpoints)
    return used, {
        "losses": module.losses,
        "batches": module.trained,
        "validated": validated.after,
        "place": (used.global_step, used.current_epoch, used.fit_loop.epoch_loop.total_batch_idx),
        "metrics": {name: value.item() for name, value in used.callback_metrics.items()},
        "logged": [_lines(Path(logger.log_dir, "metrics.csv")) for logger in loggers],
        "callbacks": [_told_by(callback, root) for callback in callbacks],
        "checkpoints": [str(path.relative_to(root)) for path in left],
    }


def outcome(
    feature: Feature, clock: Clock, root: Path, strategy: str = "auto", pipelined: bool = False
) -> dict[str, Any]:
    """All that a run leaves."""
    used, found = train(feature, clock, root, strategy, pipelined)
    return found | {
        "parameters": {name: value.clone() for name, value in used.lightning_module.state_dict().items()},
        "optimizers": [optimizer.state_dict() for optimizer in used.optimizers],
        "saved": [_read(root / name) for name in found["checkpoints"]],
    }


def _lines(path: Path) -> list[dict[str, str]]:
    """What a CSVLogger has written, if anything."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def _told_by(callback: Callback, root: Path) -> Any:
    """What a callback has found out."""
    if isinstance(callback, LearningRateFinder):
        assert callback.optimal_lr is not None
        return callback.optimal_lr.results
    told = callback.state_dict()
    return {key: str(value).replace(str(root), "") for key, value in told.items()}


def _read(path: Path) -> Any:
    checkpoint = torch.load(path, weights_only=False)
    kept = ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step", "current_model_state")
    return {key: checkpoint[key] for key in kept if key in checkpoint}


def different(one: Any, other: Any, place: str = "") -> list[str]:
    """Where two outcomes differ, in any bit."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = {*one, *other}
        return [
            where
            for key in sorted(keys, key=str)
            for where in different(one.get(key, KeyError), other.get(key, KeyError), f"{place} {key}")
        ]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        return [
            where for i, pair in enumerate(zip(one, other, strict=True)) for where in different(*pair, f"{place} {i}")
        ]
    same = torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other
    return [] if same else [f"{place}: {one}, and should be {other}"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_works_as_in_lightnings_own_loop(name: str, clock: Clock, tmp_path: Path) -> None:
    feature = FEATURES[name]
    theirs = outcome(feature, clock, tmp_path / "theirs")
    ours = outcome(feature, clock, tmp_path / "ours", "pipeline")
    assert different(ours, theirs) == []


# ---------------------------------------------------------------------- one process is one device


@pytest.mark.filterwarnings("ignore")
def test_a_batch_size_is_looked_for_in_the_pipelined_loop(clock: Clock, tmp_path: Path) -> None:
    # Three trials of two batches, of 2, 4 and 8 rows, and three epochs of the last.
    feature = Feature(Tuned, callbacks=(lambda: BatchSizeFinder(steps_per_trial=2, max_trials=3),), batches=15)
    theirs = outcome(feature, clock, tmp_path / "theirs")
    assert different(outcome(feature, clock, tmp_path / "ours", pipelined=True), theirs) == []


def test_a_strategy_for_several_processes_refuses_to_look_for_a_batch_size(clock: Clock, tmp_path: Path) -> None:
    feature = Feature(Tuned, callbacks=(BatchSizeFinder,))
    with pytest.raises(MisconfigurationException, match="not supported with distributed strategies"):
        outcome(feature, clock, tmp_path, "pipeline")
