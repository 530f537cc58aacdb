"""What Lightning would trust in a checkpoint is refused where it would delete files or fail later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pipe.engine import SetupError
from lightning_pipe.strategies import PipelineStrategy
from lightning_pipe.strategies.checkpoint_contents import checked_contents
from tests.distributed import run_ranks
from tests.loops.models import Net, trainer
from tests.strategies import cases

STATE = "ModelCheckpoint{'monitor': None}"
PROGRESS = {"total": {"ready": 1, "completed": 1}, "current": {"ready": 1, "completed": 1}, "is_last_batch": True}


def contents(**changed: Any) -> dict[str, Any]:
    whole = {
        "pytorch-lightning_version": "2.6.0",
        "state_dict": {"weight": torch.ones(2)},
        "optimizer_states": [{"state": {}, "param_groups": []}],
        "lr_schedulers": [{"last_epoch": 1}],
        "callbacks": {STATE: {"dirpath": "/saved", "last_model_path": "/saved/last.ckpt", "best_k_models": {}}},
        "loops": {"fit_loop": {"state_dict": {}, "epoch_loop.batch_progress": PROGRESS}, "validate_loop": {}},
    }
    return {**whole, **changed}


def checkpoint_state(**changed: Any) -> dict[str, Any]:
    return contents(callbacks={STATE: {"dirpath": "/saved", **changed}})


def progress(**changed: Any) -> dict[str, Any]:
    return contents(loops={"fit_loop": {"epoch_loop.batch_progress": {**PROGRESS, **changed}}})


def test_what_lightning_writes_is_returned_as_it_is() -> None:
    whole = contents()
    assert checked_contents(whole, "a.ckpt", None) is whole
    # Of a run that wrote its checkpoints elsewhere; Lightning deletes nothing there.
    before = checkpoint_state(best_model_path="/elsewhere/best.ckpt", best_k_models={"/saved/a/b.ckpt": 1.0})
    assert checked_contents(before, "a.ckpt", None) is before


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "out of the folder": (checkpoint_state(last_model_path="/saved/../victim"), "last_model_path"),
    "out of the folder, best": (checkpoint_state(best_k_models={"/saved/../victim": 1.0}), "best_k_models"),
    "another protocol": (checkpoint_state(best_model_path="local:///home/user"), "best_model_path"),
    "protocols in a chain": (checkpoint_state(kth_best_model_path="a::file:///home/user"), "kth_best_model_path"),
    "no path": (checkpoint_state(last_model_path=7), "last_model_path"),
    "no paths": (checkpoint_state(best_k_models=7), "best_k_models"),
    "no callbacks": (contents(callbacks=[1]), "callbacks"),
    "no loops": (contents(loops=7), "loops"),
    "no fit loop": (contents(loops={}), "fit_loop"),
    "a loop that is none": (contents(loops={"fit_loop": {}, "validate_loop": 1}), "loops/validate_loop"),
    "text for a count": (progress(current={"ready": "a"}), "loops/fit_loop/epoch_loop.batch_progress/current/ready"),
    "a count below zero": (progress(current={"ready": -1}), "current/ready"),
    "a count without end": (progress(current={"ready": 2**80}), "current/ready"),
    "a count for a truth": (progress(is_last_batch=1), "is_last_batch"),
    "a truth for a count": (progress(total={"ready": True}), "total/ready"),
    "no progress": (contents(loops={"fit_loop": {"epoch_progress": [1]}}), "epoch_progress"),
    "no state of a loop": (contents(loops={"fit_loop": {"state_dict": [1]}}), "loops/fit_loop/state_dict"),
    "no version": (contents(**{"pytorch-lightning_version": "zz"}), "pytorch-lightning_version"),
    "no tensors": (contents(state_dict=7), "state_dict"),
    "tensors without names": (contents(state_dict={1: 2}), "state_dict"),
    "no optimisers": (contents(optimizer_states=7), "optimizer_states"),
    "an empty optimiser": (contents(optimizer_states=[{}]), "optimizer_states"),
    "no schedules": (contents(lr_schedulers=[7]), "lr_schedulers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_anything_else_is_refused_with_the_file_and_the_field(name: str) -> None:
    found, field = REFUSED[name]
    with pytest.raises(SetupError, match=r"^The checkpoint 'a\.ckpt' is damaged: ") as caught:
        checked_contents(found, "a.ckpt", None)
    assert field in str(caught.value)


def test_checkpoints_on_other_file_systems_stay_in_their_folders() -> None:
    module = Net()
    module.trainer = trainer(callbacks=[ModelCheckpoint("memory://saved")], enable_checkpointing=True)
    inside = checkpoint_state(last_model_path="memory://saved/last.ckpt")
    assert checked_contents(inside, "a.ckpt", module) is inside
    with pytest.raises(SetupError, match="last_model_path"):
        checked_contents(checkpoint_state(last_model_path="memory://others/last.ckpt"), "a.ckpt", module)


def folder_of_tables(path: Path, resume: Path | None = None) -> None:
    saves = ModelCheckpoint(path, every_n_train_steps=2, save_last=True, save_on_train_epoch_end=False)
    options = {"callbacks": [saves], "enable_checkpointing": True, "max_epochs": 1 if resume is None else 2}
    cases.fit(cases.Clicks(), cases.recsys("base"), ckpt_path=resume, **options)


def file_of_a_net(path: Path, resume: Path | None = None) -> None:
    saves = ModelCheckpoint(path, every_n_train_steps=2, save_last=True, save_on_train_epoch_end=False)
    options = {"callbacks": [saves], "enable_checkpointing": True, "max_epochs": 1 if resume is None else 2}
    options["devices"] = dist.get_world_size() if dist.is_initialized() else 1
    trainer(strategy=PipelineStrategy(), **options).fit(Net(), ckpt_path=resume, weights_only=True)


def resume_from_a_hostile_file(rank: int, world_size: int, folder: Path) -> tuple[str, bool]:
    victim = folder / "victim"
    file_of_a_net(folder / "saved")
    if rank == 0:
        victim.mkdir()
        (victim / "thesis.txt").write_text("precious")
        (source,) = (folder / "saved").glob("*step=*.ckpt")
        found = torch.load(source, weights_only=True)
        (state,) = (one for name, one in found["callbacks"].items() if name.startswith("ModelCheckpoint"))
        state["last_model_path"] = str(folder / "saved" / ".." / "victim")
        torch.save(found, folder / "hostile.ckpt")
    dist.barrier()
    try:
        file_of_a_net(folder / "saved", folder / "hostile.ckpt")
    except SetupError as error:
        return str(error), (victim / "thesis.txt").exists()
    return "", (victim / "thesis.txt").exists()


def test_a_file_that_names_a_folder_of_the_users_as_its_last_checkpoint_deletes_nothing(tmp_path: Path) -> None:
    for message, is_there in run_ranks(resume_from_a_hostile_file, 2, tmp_path):
        assert "'last_model_path'" in message
        assert is_there


@pytest.mark.parametrize("train", [file_of_a_net, folder_of_tables])
def test_a_run_that_deletes_its_older_checkpoints_resumes(train: Callable[..., None], tmp_path: Path) -> None:
    train(tmp_path)
    train(tmp_path, tmp_path / "last.ckpt")
    assert (tmp_path / "last.ckpt").exists()
