"""A save that does not come to its end leaves the checkpoint before it whole, and nothing that passes for one."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_pipe.engine import SetupError
from tests.distributed import run_ranks
from tests.strategies.cases import Clicks, fit, loader, recsys, trainer


def keeping(folder: Path) -> dict[str, Any]:
    """The trainer's arguments for keeping the best checkpoint and the last."""
    callback = ModelCheckpoint(folder, filename="{epoch}", monitor="val_loss", save_last=True)
    return {"enable_checkpointing": True, "default_root_dir": folder, "callbacks": [callback]}


def train(folder: Path, epochs: int, path: str | None = "last") -> Any:
    """Train on to a number of epochs from the last checkpoint, and keep one of each."""
    return fit(Clicks(), recsys(), val=loader(8), max_epochs=epochs, ckpt_path=path, **keeping(folder))


def contents(folder: Path) -> dict[str, bytes]:
    """Of the checkpoints in a folder, and of all that could pass for one."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("flight_"))
    found = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return {name: content for name, content in found.items() if not name.startswith(".")}


def check_that_the_last_is_used(folder: Path, before: dict[str, bytes], steps: int) -> None:
    """It was written after so many steps; an epoch more is trained from it."""
    assert contents(folder) == before
    assert {name.partition("/")[0] for name in before} == {"epoch=0.ckpt", "last.ckpt"}
    used = train(folder, 2)
    assert used.global_step == steps + len(loader())
    assert used.validate(dataloaders=loader(8), ckpt_path="best", verbose=False)
    assert not [path for path in folder.iterdir() if path.name.startswith(".last")]


# ---------------------------------------------------------------------- on one rank of two


def on_two_ranks(rank: int, world_size: int, folder: Path) -> None:
    """The result is in files, since the ranks do not live to return it."""
    train(folder / "kept", 1, None)
    before = contents(folder / "kept")
    write_data = dcp.FileSystemWriter.write_data

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError("the cable is cut")

    def killed(*args: Any, **kwargs: Any) -> Any:
        write_data(*args, **kwargs)  # all is there but for the end
        os.kill(os.getpid(), signal.SIGKILL)

    def error_with(fault: Any) -> str:
        fault = fault if rank == 1 else write_data
        with mock.patch.object(dcp.FileSystemWriter, "write_data", fault), pytest.raises(SetupError) as caught:
            train(folder / "kept", 2)
        return str(caught.value)

    (folder / f"broken {rank}").write_text(error_with(broken))
    dist.barrier()
    assert contents(folder / "kept") == before
    assert not list((folder / "kept").glob(".*"))
    if rank == 0:
        torch.save(before, folder / "before")
    (folder / f"killed {rank}").write_text(error_with(killed))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    with pytest.raises(AssertionError, match="rank 1 of 2 was ended by SIGKILL"):
        run_ranks(on_two_ranks, 2, folder)
    return folder


def test_an_error_in_one_rank_s_writer_ends_all_and_says_where(folder: Path) -> None:
    for rank in range(2):
        message = (folder / f"broken {rank}").read_text()
        assert ".ckpt' cannot be written: the cable is cut (on rank 1)." in message


def test_a_rank_that_is_killed_while_it_writes_ends_the_others(folder: Path) -> None:
    message = (folder / "killed 0").read_text()
    assert "cannot be written, since another rank has ended or does not answer" in message


def test_after_a_kill_training_goes_on_from_the_checkpoint_before(folder: Path) -> None:
    assert [path.name for path in (folder / "kept").glob(".*")], "the save was not under way"
    check_that_the_last_is_used(folder / "kept", torch.load(folder / "before"), len(loader()) // 2)


# ---------------------------------------------------------------------- a full disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of one megabyte."""
    found = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True, text=True, check=False
    )
    if found.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted here: {found.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def _fill(filler: Any) -> None:
    with suppress(OSError):
        while True:
            filler.write(bytes(4096))
    assert os.statvfs(filler.name).f_bavail == 0


@pytest.mark.parametrize("room", [0, 16384], ids=["no room", "room for some"])
def test_a_full_disk_leaves_the_checkpoint_before(disk: Path, room: int) -> None:
    train(disk / "kept", 1, None)
    before = contents(disk / "kept")
    with (disk / "filler").open("wb", buffering=0) as filler:
        _fill(filler)
        filler.truncate(filler.tell() - room)
    with pytest.raises(SetupError, match=r"cannot be written: .*No space left on device"):
        train(disk / "kept", 2)
    assert not list((disk / "kept").glob(".*")), "the room that the broken save took is not given back"
    (disk / "filler").unlink()
    check_that_the_last_is_used(disk / "kept", before, len(loader()))


def test_the_words_last_and_best_mean_no_folder_that_is_being_written(tmp_path: Path) -> None:
    train(tmp_path, 1, None)
    (tmp_path / "last.ckpt").rename(tmp_path / ".last.ckpt.writing")
    used = trainer(recsys(), max_epochs=1, **keeping(tmp_path))
    with pytest.warns(UserWarning, match="No checkpoint will be loaded"):
        used.fit(Clicks(), loader(), loader(8), ckpt_path="last")


def test_a_folder_with_other_things_in_it_is_not_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "precious.txt").write_text("not to be lost")
    used = fit(Clicks(), recsys(), loader(8), max_epochs=1)
    with pytest.raises(SetupError, match=r"is a folder with other files in it \(precious\.txt\)"):
        used.save_checkpoint(mine)
    assert (mine / "precious.txt").read_text() == "not to be lost"
    (tmp_path / "empty").mkdir()
    for _ in range(2):  # over nothing, and over a checkpoint
        used.save_checkpoint(tmp_path / "empty")


def resumed_apart(rank: int, world_size: int, folder: Path, others: str | None) -> str:
    callbacks = [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)]
    fit(Clicks(), recsys(), callbacks=callbacks, enable_checkpointing=True, max_steps=3)
    with pytest.raises(SetupError) as raised:
        fit(Clicks(), recsys(), ckpt_path=folder / "step=2.ckpt" if rank == 0 else others and folder / others)
    return str(raised.value)


@pytest.mark.parametrize("others", [None, "step=1.ckpt"])
def test_ranks_do_not_resume_from_different_checkpoints(others: str | None, tmp_path: Path) -> None:
    for said in run_ranks(resumed_apart, 2, tmp_path, others):
        assert "Give every rank the same checkpoint to resume from" in said
        assert "step=2.ckpt" in said
        assert str(others) in said
