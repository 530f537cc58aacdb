"""Workers of loaders end with training and evaluation, and a position is saved after other runs of the trainer, too."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_pipe.loops import PipelineTrainingEpochLoop
from lightning_pipe.loops.evaluation_loop import install_evaluation_loops
from lightning_pipe.loops.fit_loop import PipelineFitLoop
from tests.loops.models import trainer
from tests.patience import HANG


@pytest.fixture(autouse=True)
def without_collections() -> Iterator[None]:
    """A collection would end the workers of a loader that is no longer used, after waiting for each of them."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Failing(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 3:
            raise ValueError("this batch fails")
        return super().training_step(batch, batch_idx)


def pipelined(**options: Any) -> pl.Trainer:
    made = trainer(**options)
    PipelineFitLoop.install(made)
    PipelineTrainingEpochLoop.install(made)
    install_evaluation_loops(made)
    return made


def loader(persistent: bool) -> Any:
    return StatefulDataLoader(RandomDataset(32, 16), batch_size=2, num_workers=1, persistent_workers=persistent)


def workers() -> set[Any]:
    return set(multiprocessing.active_children())


def left_since(before: set[Any]) -> set[Any]:
    """Workers that do not end. On a busy machine, a worker that was told to end takes some time."""
    for worker in workers() - before:
        worker.join(HANG)
    return workers() - before


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"max_steps": 5},
        {"max_epochs": 2},
        {"max_epochs": 1, "limit_train_batches": 4, "val_check_interval": 2, "limit_val_batches": 3},
    ],
    ids=["within an epoch", "after two epochs", "with a validation"],
)
def test_workers_of_a_loader_with_a_state_end_with_training(options: dict[str, Any], persistent: bool) -> None:
    before = workers()
    pipelined(**{"limit_val_batches": 0} | options).fit(BoringModel(), loader(persistent), loader(persistent))
    assert not left_since(before)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_a_loader_with_a_state_end_with_training_that_fails(persistent: bool) -> None:
    before = workers()
    with pytest.raises(ValueError, match="this batch fails"):
        pipelined(max_epochs=1, limit_val_batches=0).fit(Failing(), loader(persistent))
    assert not left_since(before)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_of_a_loader_with_a_state_end_with_an_evaluation(persistent: bool) -> None:
    before = workers()
    one = pipelined(limit_test_batches=2, limit_predict_batches=2)
    one.test(BoringModel(), loader(persistent), verbose=False)
    one.predict(BoringModel(), loader(persistent))
    assert not left_since(before)


def fit_loop_in(one: pl.Trainer, path: Path) -> dict[str, Any]:
    one.save_checkpoint(path)
    saved: dict[str, Any] = torch.load(path, weights_only=False)["loops"]["fit_loop"]["state_dict"]
    return saved


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
@pytest.mark.parametrize("stateful", [False, True], ids=["plain", "stateful"])
def test_a_checkpoint_after_another_run_of_the_trainer_has_the_same_position(
    method: str, stateful: bool, tmp_path: Path
) -> None:
    one, model = (
        pipelined(max_steps=5, limit_val_batches=0, limit_predict_batches=1, limit_test_batches=1),
        BoringModel(),
    )
    one.fit(model, loader(False) if stateful else DataLoader(RandomDataset(32, 16), batch_size=2))
    before = fit_loop_in(one, tmp_path / "before.ckpt")
    getattr(one, method)(model, DataLoader(RandomDataset(32, 16)))
    after = fit_loop_in(one, tmp_path / "after.ckpt")
    assert repr(after) == repr(before)
    assert after["lightning_pipe"]["ranks"]
    assert ("combined_loader" in after) == stateful
