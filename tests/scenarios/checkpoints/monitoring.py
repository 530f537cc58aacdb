"""Runs whose learning rate, end and best checkpoint depend on logged values, and what resumes from their checkpoints.

As in ``resuming.py``, a resumed run is seeded otherwise: whatever it shares with the whole run comes from a checkpoint.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor
from torchmetrics import MeanMetric

from tests.scenarios.checkpoints.resuming import EPOCHS, FAMILIES, Data
from tests.scenarios.checkpoints.resuming import Setting as Loaded


@dataclass(frozen=True)
class Setting:
    """What a run monitors: a plateau of steps or epochs, a stop, checkpoints; validates every so many batches.

    *best* are options of another callback for checkpoints, which no run continues from.
    """

    name: str
    interval: str | None = None
    plateau: str = "val_loss"
    stop: str | None = None
    validates: int | None = None
    saving: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    frequency: int = 1
    best: dict[str, Any] | None = None

    def __str__(self) -> str:
        return self.name

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass
class Noted:
    """What one rank notes of a run."""

    rates: list[float]
    losses: list[float]
    final: dict[str, Tensor]
    epochs: dict[int, float]
    files: list[str]
    best: list[str]
    lowest: list[float]
    values: dict[str, float]
    saved: dict[str, int]


def monitored(family: str, setting: Setting) -> Any:
    """A module of the family that logs its loss over all ranks, with a scheduler."""
    made = FAMILIES[family].module()
    base: Any = type(made)

    class Module(base):
        def log(self, name: str, value: Any, **options: Any) -> None:
            super().log(name, value, **{**options, "sync_dist": True, "batch_size": 2})

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            value = loss.detach()
            self.log("followed", value, on_step=True, on_epoch=True, prog_bar=True)
            if batch_idx % 2 == 0:
                self.log("highest", value, on_step=False, on_epoch=True, reduce_fx="max")
            self.seen(value)
            self.log("seen", self.seen, on_step=False, on_epoch=True)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            if isinstance(optimizer, dict):
                optimizer = optimizer["optimizer"]
            if setting.interval is None:
                return optimizer
            # Halves the rate after a step with a higher loss than before, and after each validation or epoch.
            patience = 0 if setting.plateau == "followed_step" else -1
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, factor=0.5, patience=patience, threshold=0.0
            )
            rule = {"interval": setting.interval, "monitor": setting.plateau, "frequency": setting.frequency}
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **rule}}

    made.__class__ = Module
    made.seen = MeanMetric()
    return made


class Notes(Callback):
    """Notes the rate of each batch, and the mean loss of each epoch."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.epochs: dict[int, float] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.epochs[trainer.current_epoch] = float(trainer.callback_metrics["followed_epoch"])


class Saves(ModelCheckpoint):
    """Copies the folder behind each checkpoint: what a run that is killed there leaves."""

    def __init__(self, copies: Path | None, **options: Any) -> None:
        super().__init__(**{"save_top_k": -1, **options})
        self.copies = copies
        self.saved: dict[str, int] = {}

    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        if self.copies is not None:
            name = Path(filepath).name
            self.saved[name] = trainer.fit_loop.epoch_loop.total_batch_idx + 1
            trainer.strategy.barrier()
            if trainer.is_global_zero:
                shutil.copytree(str(self.dirpath), self.copies / name)
            trainer.strategy.barrier()


def run(family: str, setting: Setting, world: int, seed: int, folder: Path, start: str | None = None) -> Noted:
    """Train three epochs, or the rest of them from the checkpoint *start* of an earlier run in the same folder."""
    torch.set_num_threads(1)
    torch.manual_seed(5)  # values of the module, which a checkpoint replaces
    module = monitored(family, setting)
    notes = Notes()
    saves = Saves(folder / "copies" if start is None else None, dirpath=folder / "saved", **setting.saving)
    best = [] if setting.best is None else [ModelCheckpoint(folder / "saved", save_top_k=-1, **setting.best)]
    stops = [] if setting.stop is None else [EarlyStopping(setting.stop, min_delta=10.0, patience=1)]
    validates: dict[str, Any] = {} if setting.validates is None else {"val_check_interval": setting.validates}
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 2 if family == "in_process" else world,
            "strategy": FAMILIES[family].strategy(),
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "max_epochs": EPOCHS,
            **({"limit_val_batches": 0} if setting.validates == 0 else validates),
            **setting.options,
            "callbacks": [notes, *stops, *best, saves],
        }
    )
    torch.manual_seed(seed)
    random.seed(seed)
    data = Data(Loaded(family), 1 if FAMILIES[family].shares_data else world)
    path = None if start is None else os.path.relpath(folder / "saved" / start)
    trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=None if path is None else True)
    return Noted(
        notes.rates,
        module.losses,
        FAMILIES[family].final(trainer),
        notes.epochs,
        # The first rank replaces the folder before its next run.
        sorted(file.name for file in (folder / "saved").iterdir()) if trainer.is_global_zero else [],
        [Path(callback.best_model_path).name for callback in (*best, saves)],
        [config.scheduler.state_dict()["best"] for config in trainer.lr_scheduler_configs],
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        saves.saved,
    )


def differences(whole: Noted, rest: Noted, done: int) -> list[str]:
    """In what the rest of a run differs from the whole run, of which so many batches were trained."""
    found = []
    for name, expected in (("rates", whole.rates[done:]), ("losses", whole.losses[done:])):
        if getattr(rest, name) != expected:
            found.append(f"{name} {getattr(rest, name)}, expected {expected}")
    for name in ("files", "best", *(["lowest"] if rest.rates else [])):
        if getattr(rest, name) != getattr(whole, name):
            found.append(f"{name} {getattr(rest, name)}, expected {getattr(whole, name)}")
    for epoch, value in rest.epochs.items():
        if value != whole.epochs.get(epoch):
            found.append(f"mean of epoch {epoch} is {value}, expected {whole.epochs.get(epoch)}")
    for name, value in whole.values.items():
        if rest.values.get(name) != value:
            found.append(f"{name} is {rest.values.get(name)} in the end, expected {value}")
    for name in sorted({*rest.final, *whole.final}):
        if name not in rest.final or name not in whole.final or not torch.equal(rest.final[name], whole.final[name]):
            found.append(f"{name} in the end")
    return found


def from_every_checkpoint(
    rank: int, world: int, family: str, setting: Setting, folder: Path
) -> tuple[Noted, dict[str, list[str]]]:
    """A whole run, and in what the runs that continue from its checkpoints differ, by the checkpoint's name."""
    whole = run(family, setting, world, 1, folder)
    found = {}
    for name, done in whole.saved.items():
        if rank == 0:
            shutil.rmtree(folder / "saved")
            shutil.copytree(folder / "copies" / name, folder / "saved")
        rest = run(family, setting, world, 90 + rank, folder, name)
        found[name] = differences(whole, rest, done)
    return whole, found
