"""Trains in a job step of Slurm: ``python -m tests.scenarios.cluster.slurm_program KIND FOLDER EPOCHS``.

Each rank appends the loss of each batch to a file, before the batch counts as trained; the values of the end are saved.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from tests.scenarios.faults.training import final_state, loader, module, trainer

# Seconds that a batch takes beside its work, so that there is time for a signal; nothing depends on it.
PAUSE = 0.05


class Losses(Callback):
    def __init__(self, folder: Path) -> None:
        self._file = folder / f"losses.{os.environ['SLURM_PROCID']}"

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        with self._file.open("a") as file:
            file.write("".join(f"{loss!r}\n" for loss in module.losses))
        module.losses.clear()
        time.sleep(PAUSE)


def main(kind: str, folder: Path, epochs: int) -> None:
    trained = module(kind)
    nodes = int(os.environ["SLURM_NNODES"])
    used = trainer(
        kind, 1, num_nodes=nodes, max_epochs=epochs, callbacks=[Losses(folder)], default_root_dir=folder / "root"
    )
    torch.manual_seed(11)
    used.fit(trained, loader(kind, shuffle=True))
    state = final_state(kind, used)
    torch.save(state, folder / f"state.{used.global_rank}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
