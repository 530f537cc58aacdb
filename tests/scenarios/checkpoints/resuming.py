"""Runs that note which samples they train, under each family of strategies, and continue from their checkpoints.

A run is seeded and small. Continued runs are seeded otherwise: whatever they have in common with the undisturbed run
comes from the checkpoint.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_pipe.strategies import InProcessPipelineStrategy
from lightning_pipe.strategies.pipeline import PipelineStrategy
from tests.loops.models import Net
from tests.loops.models import Rows as PlainRows
from tests.strategies import cases, llm_cases

EPOCHS = 3
# Batches of an epoch and rank: enough for a validation in the middle, and for batches in flight on both sides of it.
BATCHES = 4
BATCH = 2


# ---------------------------------------------------------------------- samples and models


class Clicked(Dataset[Any]):
    """Rows for tables; the first dense value is the row's index, in steps that float32 holds exactly."""

    def __init__(self, length: int) -> None:
        self.rows = cases.Rows(length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        row["dense"][0] = index / 256
        return row


class Told(Dataset[Any]):
    """Rows of tokens, of which the first two spell the row's index."""

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(llm_cases.VOCABULARY, (length, 9), generator=generator)
        for index in range(length):
            self.tokens[index, :2] = torch.tensor(divmod(index, llm_cases.VOCABULARY))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index, :-1], "labels": self.tokens[index, 1:]}


class Partitioned(Net):
    """What the in-process pipe cuts: layers and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.model = self.layers
        del self.layers

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(batch).square().mean())


def _of_rows(batch: Tensor) -> list[int]:
    return [int(index) for index in batch[:, 0]]


def _of_clicks(batch: cases.Batch) -> list[int]:
    return [round(float(value) * 256) for value in batch.dense[:, 0]]


def _of_tokens(batch: dict[str, Tensor]) -> list[int]:
    first = batch["input_ids"][:, :2]
    return [int(index) for index in first[:, 0] * llm_cases.VOCABULARY + first[:, 1]]


def _final_of_module(used: pl.Trainer) -> dict[str, Tensor]:
    found = {name: value.detach().clone() for name, value in used.lightning_module.state_dict().items()}
    for optimizer in used.optimizers:
        for index, state in optimizer.state_dict()["state"].items():
            found.update({f"{index} {key}": value.clone() for key, value in state.items() if torch.is_tensor(value)})
    return found


@dataclass(frozen=True)
class Family:
    """One family of strategies; makes samples, finds their indices in a batch, and gives all that training leaves."""

    module: Callable[[], pl.LightningModule]
    strategy: Callable[[], Any]
    dataset: Callable[[int], Any]
    indices: Callable[[Any], list[int]]
    final: Callable[[pl.Trainer], dict[str, Tensor]] = _final_of_module
    shares_data: bool = False
    options: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "pipeline": Family(Net, PipelineStrategy, PlainRows, _of_rows),
    "recsys": Family(
        lambda: cases.Clicks(cases.Mixed),
        cases.recsys,
        Clicked,
        _of_clicks,
        cases.state_of,
        options={"collate_fn": cases.collate},
    ),
    "managed": Family(
        lambda: cases.Clicks(cases.Managed),
        cases.recsys,
        Clicked,
        _of_clicks,
        cases.state_of,
        options={"collate_fn": cases.collate},
    ),
    "llm": Family(
        lambda: llm_cases.Tiny(optimizer="adamw"),
        # As many micro-batches as a batch has samples; 1F1B wants one for each of three stages, GPipe does not.
        lambda: llm_cases.llm("1f1b" if int(os.environ.get("WORLD_SIZE", "1")) <= BATCH else "gpipe", BATCH),
        Told,
        _of_tokens,
        shares_data=True,
    ),
    "in_process": Family(Partitioned, lambda: InProcessPipelineStrategy(2), PlainRows, _of_rows),
}

# Ranks that a test has spawned would spawn their workers, too; those of a launcher fork them.
_FORK = {"multiprocessing_context": "fork"}
LOADERS: dict[str, dict[str, Any]] = {
    "no workers": {},
    "1 worker": {"num_workers": 1, **_FORK},
    "2 workers": {"num_workers": 2, **_FORK},
    "1 persistent worker": {"num_workers": 1, "persistent_workers": True, **_FORK},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1, **_FORK},
}


# ---------------------------------------------------------------------- a run


@dataclass(frozen=True)
class Setting:
    """What a run trains, and how; it validates every so many batches, 0 for never."""

    family: str
    loader: str = "no workers"
    validates: int = 0
    reloads: int = 0

    def __str__(self) -> str:
        return f"{self.family}, {self.loader}, validates {self.validates}, reloads {self.reloads}"


@dataclass
class Noted:
    """What one rank notes of a run: indices of each batch, losses, all that is left, and batches before each save."""

    samples: list[list[int]]
    losses: list[float]
    final: dict[str, Tensor]
    saved: dict[str, int]


class Notes(Callback):
    """Notes samples; writes a checkpoint after each batch, validation and epoch where *folder* is given."""

    def __init__(self, family: Family, folder: Path | None) -> None:
        self.family, self.folder = family, folder
        self.samples: list[list[int]] = []
        self.saved: dict[str, int] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.samples.append(self.family.indices(batch))
        self._save(trainer, "batch")

    def on_validation_end(self, trainer: pl.Trainer, module: Any) -> None:
        if not trainer.sanity_checking:
            self._save(trainer, "validation")

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        self._save(trainer, "epoch")

    def _save(self, trainer: pl.Trainer, after: str) -> None:
        if self.folder is not None:
            name = f"{len(self.samples)}-{after}.ckpt"
            trainer.save_checkpoint(self.folder / name)
            self.saved[name] = len(self.samples)


class Data(pl.LightningDataModule):
    """Loaders of a setting, made anew whenever they are asked for."""

    def __init__(self, setting: Setting, replicas: int) -> None:
        super().__init__()
        self.setting, self.replicas = setting, replicas

    def _loader(self, rows: int, **options: Any) -> DataLoader[Any]:
        family = FAMILIES[self.setting.family]
        options = {"batch_size": BATCH, **family.options, **LOADERS[self.setting.loader], **options}
        return DataLoader(family.dataset(rows), **options)

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(BATCHES * BATCH * self.replicas, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(2 * BATCH * self.replicas)


def run(
    setting: Setting,
    world: int,
    seed: int,
    folder: Path | None = None,
    ckpt_path: Path | str | None = None,
    **options: Any,
) -> Noted:
    """Train three epochs, or the rest of them; checkpoints are written to *folder*, where it is given."""
    torch.set_num_threads(1)
    family = FAMILIES[setting.family]
    torch.manual_seed(5)  # values of the module, which a checkpoint replaces
    module: Any = family.module()
    notes = Notes(family, folder)
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu",
            "devices": 2 if setting.family == "in_process" else world,
            "strategy": family.strategy(),
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "max_epochs": EPOCHS,
            "reload_dataloaders_every_n_epochs": setting.reloads,
            **({"val_check_interval": setting.validates} if setting.validates else {"limit_val_batches": 0}),
            **options,
            "callbacks": [notes, *options.get("callbacks", ())],
        }
    )
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    data = Data(setting, 1 if family.shares_data else world)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=None if ckpt_path is None else True)
    return Noted(notes.samples, module.losses, family.final(trainer), notes.saved)


def differences(whole: Noted, rest: Noted, trained: int) -> list[str]:
    """In what the rest of a run differs from the undisturbed one, of which so many batches were trained."""
    found = []
    if rest.samples != whole.samples[trained:]:
        found.append(f"samples {rest.samples}, expected {whole.samples[trained:]}")
    if rest.losses != whole.losses[trained:]:
        found.append(f"losses {rest.losses}, expected {whole.losses[trained:]}")
    for name in sorted({*rest.final, *whole.final}):
        if name not in rest.final or name not in whole.final or not torch.equal(rest.final[name], whole.final[name]):
            found.append(f"{name} in the end")
    return found


def from_every_checkpoint(rank: int, world: int, setting: Setting, folder: Path) -> tuple[Noted, dict[str, list[str]]]:
    """An undisturbed run, and what the runs that continue from its checkpoints have different, by their names."""
    whole = run(setting, world, 1, folder)
    rest = {name: run(setting, world, 90 + rank, ckpt_path=folder / name) for name in whole.saved}
    return whole, {name: differences(whole, rest[name], trained) for name, trained in whole.saved.items()}
