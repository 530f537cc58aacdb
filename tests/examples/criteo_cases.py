"""Runs of the Criteo example's configuration in small, which may be killed, and continued by the same command."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml

from lightning_pipe.cli.main import main
from tests.scenarios.faults.forked_ranks import Here

CONFIG = Path(__file__).parents[2] / "examples" / "recsys_criteo" / "prefetch.yaml"
ROWS, GROUP, BATCH = 1024, 64, 32


class Notes(pl.Callback):
    """Writes the loss of each step to a file, saves the last state, and kills this rank before a batch.

    Args:
        folder: folder of the files.
        dies: rank and step of the kill; None where there is none.
    """

    def __init__(self, folder: str, dies: tuple[int, int] | None = None) -> None:
        self.folder, self.dies = Path(folder), dies

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self.dies == (trainer.global_rank, trainer.global_step):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        with (self.folder / f"losses_{trainer.global_rank}").open("a") as file:
            file.write(json.dumps([trainer.global_step, outputs["loss"].item()]) + "\n")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            with (self.folder / f"scores_{trainer.global_rank}").open("a") as file:
                file.write(json.dumps(trainer.callback_metrics["val/auroc"].item()) + "\n")

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self.folder / "final.ckpt")

    @staticmethod
    def scores(folder: Path, rank: int) -> list[float]:
        """AUC of each validation."""
        return [json.loads(line) for line in (folder / f"scores_{rank}").read_text().splitlines()]

    @staticmethod
    def losses(folder: Path, rank: int) -> list[tuple[int, float]]:
        """Steps and losses in the order in which they were trained."""
        return [tuple(json.loads(line)) for line in (folder / f"losses_{rank}").read_text().splitlines()]


def small(folder: Path, ranks: int, workers: int = 0, plan: str = "prefetch") -> dict[str, Any]:
    """The example's configuration with fewer rows and narrower layers, for two epochs."""
    folder.mkdir(exist_ok=True)
    configuration: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    configuration["model"]["init_args"] |= {"table_rows": 50, "embedding_dim": 4, "over_layers": [8]}
    sizes = {"rows": ROWS, "validation_rows": 2 * GROUP, "rows_per_group": GROUP, "batch_size": BATCH}
    configuration["data"]["init_args"] |= {**sizes, "workers": workers}
    trainer = configuration["trainer"]
    trainer |= {"devices": ranks, "max_epochs": 2, "strategy": f"recsys_{plan}_pipeline", "enable_progress_bar": False}
    (checkpoint,) = (one for one in trainer["callbacks"] if one["class_path"].endswith("ModelCheckpoint"))
    checkpoint["init_args"]["every_n_train_steps"] = 3
    trainer["callbacks"] = [checkpoint, {"class_path": f"{__name__}.Notes", "init_args": {"folder": str(folder)}}]
    return configuration


def fit(here: Here, folder: Path, configuration: dict[str, Any], dies: tuple[int, int] | None = None) -> None:
    """Train as ``lightning-pipe fit --config CONFIG --ckpt_path last`` in *folder* does."""
    os.chdir(folder)
    if dies is not None:
        configuration["trainer"]["callbacks"][-1]["init_args"]["dies"] = list(dies)
    path = folder / f"config_{here.rank}.yaml"
    path.write_text(yaml.safe_dump(configuration))
    assert main(["fit", "--config", str(path), "--ckpt_path", "last"]) == 0
