"""Run by torchrun: trains one strategy after another; rank 1 is killed once in each, and the job starts again.

Arguments: a folder, and the names of the strategies.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from tests.scenarios.faults.training import final_state, fit, loader, module

# Every second batch a checkpoint is written.
EVERY, KILLED_AT = 2, 9


class Killed(Callback):
    """Kills rank 1 at a step of the first attempt; notes what every attempt trains."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        step, killed = trainer.global_step, self.folder / "killed"
        with (self.folder / f"steps_{trainer.global_rank}").open("a") as steps:
            steps.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {step}\n")
        if trainer.global_rank == 1 and step == KILLED_AT and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """Two epochs of six batches, from the last checkpoint where there is one."""
    folder.mkdir(exist_ok=True)
    saving = ModelCheckpoint(folder, every_n_train_steps=EVERY, save_last=True)
    used = fit(
        kind,
        2,
        module(kind),
        loader(kind, shuffle=True),
        ckpt_path="last",
        callbacks=[*([Killed(folder)] if "TORCHELASTIC_RESTART_COUNT" in os.environ else []), saving],
        enable_checkpointing=True,
        max_epochs=2,
        default_root_dir=folder,
    )
    return final_state(kind, used)


def main() -> None:
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    for kind in sys.argv[2:]:
        final = folder / kind / f"final_{rank}"
        if not final.exists():  # on both ranks, or on none: the next is killed behind a checkpoint of its own
            torch.save(train(kind, folder / kind), final)


if __name__ == "__main__":
    main()
