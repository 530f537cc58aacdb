"""Writes the checkpoints and plans of ``kept/``, which later versions must be able to read.

python -m tests.scenarios.checkpoints.kept_files FOLDER   # with the version that is to be kept
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_pipe.recsys import PLANS, recsys_plan, recsys_tasks
from tests.distributed import run_ranks
from tests.scenarios.faults.training import fit, module
from tests.strategies import cases

KINDS = ("pipeline", "recsys", "llm")
STEP = 3


def state_of(trainer: pl.Trainer, kind: str) -> dict[str, Tensor]:
    """Values of this rank: whole tables of recommenders, the rank's own stages of language models."""
    if kind == "recsys":
        return cases.state_of(trainer)
    return {name: value.detach().clone() for name, value in trainer.lightning_module.state_dict().items()}


class Save(Callback):
    """Saves a checkpoint after a step, and the values that are in it."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == STEP:
            trainer.save_checkpoint(self._folder / self._kind / "checkpoint")
            values = state_of(trainer, self._kind)
            torch.save(values, self._folder / self._kind / f"values_{trainer.global_rank}.pt")


def train(rank: int, world_size: int, folder: Path) -> None:
    for kind in KINDS:
        fit(kind, world_size, module(kind), callbacks=[Save(folder, kind)])


def main(folder: Path) -> None:
    for kind in KINDS:
        (folder / kind).mkdir(parents=True)
    run_ranks(train, 2, folder)
    for name in PLANS:
        (folder / f"{name}.yaml").write_text(recsys_plan(name, recsys_tasks()).to_yaml())


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
