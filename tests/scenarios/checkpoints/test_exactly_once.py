"""Over any run every batch of the loader is trained once, in its order, however the run is cut up."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, State, SWPipeline, TaskSchedule
from lightning_pipe.loops import PipelineTrainingEpochLoop, TrainingProgram
from tests.loops.models import Net, trainer
from tests.scenarios.checkpoints.test_exact_resume import Augmented

FEW = settings(max_examples=15, deadline=None, database=None, suppress_health_check=list(HealthCheck))


class Ahead(SingleDeviceStrategy):
    """Moves batches some iterations ahead, on a worker thread or not."""

    def __init__(self, stages: int) -> None:
        super().__init__(torch.device("cpu"))
        self.stages = stages

    def training_program(self, trainer: pl.Trainer, transfer: Any) -> TrainingProgram:
        def copy(ctx: IterContext) -> None:
            ctx.batch = transfer(ctx.batch)

        def train(ctx: IterContext) -> None:
            """The caller's."""

        tasks = {
            PipelineTask("H2D", copy, reads=("batch",), writes=("batch",)): TaskSchedule(stage=self.stages),
            PipelineTask("TrainBatch", train, reads=("batch",), writes=(State("model"),)): TaskSchedule(),
        }
        pipeline = SWPipeline(PipelinePlan(tasks, name=f"{self.stages} ahead"), torch.device("cpu"))
        return TrainingProgram(pipeline, transfer="H2D", step="TrainBatch")


class Watched(Net):
    """Draws in its hooks; fails, or stops, before it trains a certain batch."""

    def __init__(self, length: int, batch_size: int, fails_at: int | None = None) -> None:
        super().__init__(Augmented(length), batch_size)
        self.fails_at = fails_at

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        batch[:, 5] += torch.rand(len(batch)) + random.random() + float(numpy.random.rand())
        return batch

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if len(self.trained) == self.fails_at:
            raise KeyError("a bug of the user's")
        return super().training_step(batch, batch_idx)

    def val_dataloader(self) -> Any:
        return DataLoader(Augmented(4), batch_size=2)


class SaveEvery(Callback):
    """Writes the same checkpoint over and over; stops where it is told."""

    def __init__(self, path: Path, every: int, stop_after: int | None = None) -> None:
        self.path, self.every, self.stop_after = path, every, stop_after
        self.saved = 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return
        if len(module.trained) % self.every == 0:
            trainer.save_checkpoint(self.path)
            self.saved = len(module.trained)
        if self.stop_after is not None and len(module.trained) >= self.stop_after:
            trainer.should_stop = True


def fit(module: Watched, stages: int, seed: int, ckpt_path: Path | None = None, **options: Any) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for layer in module.layers:
            if isinstance(layer, torch.nn.Linear):
                layer.reset_parameters()
    used = trainer(strategy=Ahead(stages), num_sanity_val_steps=0, **options)
    PipelineTrainingEpochLoop.install(used)
    used.fit(module, ckpt_path=ckpt_path, weights_only=None if ckpt_path is None else True)


runs = st.fixed_dictionaries(
    {
        "length": st.integers(1, 17),
        "batch_size": st.integers(1, 4),
        "stages": st.integers(0, 4),
        "epochs": st.integers(1, 3),
        "accumulate": st.sampled_from([1, 1, 2]),
        "every": st.integers(1, 5),
        "validates": st.sampled_from([0.5, 1.0]),
    }
)


def options_of(run: dict[str, Any]) -> dict[str, Any]:
    return {
        "max_epochs": run["epochs"],
        "accumulate_grad_batches": run["accumulate"],
        "val_check_interval": run["validates"],
    }


@FEW
@given(run=runs)
def test_every_row_is_trained_once_in_each_epoch(run: dict[str, Any]) -> None:
    module = Watched(run["length"], run["batch_size"])
    fit(module, run["stages"], 1, **options_of(run))
    rows = [row for batch in module.trained for row in batch]
    assert len(rows) == run["epochs"] * run["length"]
    for epoch in range(run["epochs"]):
        of_epoch = rows[epoch * run["length"] : (epoch + 1) * run["length"]]
        assert sorted(of_epoch) == list(range(run["length"]))


@FEW
@given(run=runs, other_stages=st.integers(0, 4), at=st.integers(1, 30), stops=st.booleans())
def test_a_run_that_fails_or_stops_anywhere_goes_on_from_its_last_checkpoint(
    run: dict[str, Any], other_stages: int, at: int, stops: bool
) -> None:
    """Under another plan too, and whatever other seeds are."""
    whole = Watched(run["length"], run["batch_size"])
    fit(whole, run["stages"], 1, **options_of(run))
    with tempfile.TemporaryDirectory() as folder:
        saving = SaveEvery(Path(folder) / "a.ckpt", run["every"], at if stops else None)
        first = Watched(run["length"], run["batch_size"], fails_at=None if stops else at)
        try:
            fit(first, run["stages"], 1, callbacks=[saving], **options_of(run))
        except KeyError:
            assert not stops
        assert first.trained == whole.trained[: len(first.trained)]
        if not saving.saved:
            return
        second = Watched(run["length"], run["batch_size"])
        fit(second, other_stages, 77, ckpt_path=saving.path, **options_of(run))
    assert second.trained == whole.trained[saving.saved :]
    assert second.losses == whole.losses[saving.saved :]
    for one, other in zip(second.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one, other)
