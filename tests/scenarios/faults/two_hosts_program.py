"""Run by torchrun on each of two hosts: trains the prefetch plan, first to an end, then until the link is cut.

Arguments: a folder that both hosts share, and the seconds that ranks wait for each other.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from tests.scenarios.faults.training import fit, module


class Beginning(Callback):
    """Says when training is under way."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3:
            self.file.touch()


def main() -> None:
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    strategy = {"timeout": timedelta(seconds=float(sys.argv[2]))}
    trained = module("recsys")
    fit("recsys", 1, trained, num_nodes=2, strategy=strategy)
    (folder / f"losses_{rank}").write_text(repr(trained.losses))
    try:
        beginning = Beginning(folder / f"begun_{rank}")
        fit("recsys", 1, module("recsys"), num_nodes=2, strategy=strategy, callbacks=[beginning], max_epochs=100_000)
    except Exception as error:
        said = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        (folder / f"saying_{rank}").write_text(said)
        (folder / f"saying_{rank}").rename(folder / f"said_{rank}")
        raise


if __name__ == "__main__":
    main()
