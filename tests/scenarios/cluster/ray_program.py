"""Code of the tests that runs in Ray's workers: callbacks that record losses and kill a worker, and wrong trainers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pyarrow.fs
import ray.train

from lightning_pipe.ray import RayLightningEnvironment, ReportToRay, prepare_trainer


class Losses(pl.Callback):
    """Appends each batch's number in the epoch and loss to a file of the rank.

    Args:
        folder: folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with (self._folder / f"losses.{trainer.global_rank}").open("a") as file:
            file.write(f"{batch_idx} {outputs['loss'].item()!r}\n")


class Killed(pl.Callback):
    """Kills the process of rank 1 after a batch, once.

    Args:
        folder: folder for a mark that it has happened.
        after: number of the batch.
    """

    def __init__(self, folder: Path, after: int) -> None:
        self._mark, self._after = folder / "killed", after

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == self._after and not self._mark.exists():
            self._mark.touch()
            # Ray takes note of a checkpoint seconds after it was reported.
            ray.train.get_all_reported_checkpoints(ray.train.CheckpointConsistencyMode.COMMITTED)
            os.kill(os.getpid(), signal.SIGKILL)


def wrong_trainers(config: dict[str, Any]) -> None:
    """Writes to a file of the rank, one a line, the error of each wrong trainer, and that right ones are accepted."""
    from lightning_pipe.strategies import InProcessPipelineStrategy, RecsysPipelineStrategy

    rank = ray.train.get_context().get_world_rank()
    right: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "logger": False, "enable_progress_bar": False}
    environment: list[Any] = [RayLightningEnvironment()]
    asynchronous = RecsysPipelineStrategy("serial", async_checkpoints=True)

    def prepare(**arguments: Any) -> None:
        prepare_trainer(pl.Trainer(**{**right, "plugins": environment, "strategy": "pipeline", **arguments}))

    def report(strategy: Any = "pipeline") -> None:
        callback = ReportToRay(2)
        trainer = pl.Trainer(**right, plugins=environment, strategy=strategy, callbacks=[callback])
        callback.setup(trainer, pl.LightningModule(), "fit")

    def report_elsewhere(**attributes: Any) -> None:
        storage = ray.train.get_context().get_storage()
        before = {name: getattr(storage, name) for name in attributes}
        vars(storage).update(attributes)
        try:
            report()
        finally:
            vars(storage).update(before)

    def every(steps: int) -> Callable[[], ReportToRay]:
        return lambda: ReportToRay(steps)

    of_rank_1 = {"devices": 1} if rank == 1 else {}
    store = pyarrow.fs.SubTreeFileSystem("/", pyarrow.fs.LocalFileSystem())
    here = {"storage_fs_path": "/no/such/folder"} if rank == 1 else {}
    tried: dict[str, Callable[[], Any]] = {
        "no plugin": lambda: prepare(plugins=[]),
        "one device": lambda: prepare(devices=1),
        "one device on a rank": lambda: prepare(**of_rank_1),
        "two nodes": lambda: prepare(devices=1, num_nodes=2),
        "another project's strategy": lambda: prepare(strategy="ddp"),
        "one process": lambda: prepare(strategy=InProcessPipelineStrategy()),
        "no step": every(0),
        "in the background": lambda: report(asynchronous),
        "a store": lambda: report_elsewhere(storage_filesystem=store),
        "unseen by a rank": lambda: report_elsewhere(**here),
        "right": prepare,
        "right for the default plan": lambda: prepare(strategy="pipeline"),
        "right for stages": lambda: prepare(strategy="llm_1f1b_pipeline"),
        "right to report": report,
    }
    lines = []
    for name, call in tried.items():
        try:
            call()
            lines.append(f"{name}: accepted")
        except Exception as error:
            lines.append(f"{name}: {type(error).__name__}: {error}".replace("\n", " "))
    Path(config["folder"], f"told.{rank}").write_text("\n".join(lines))
