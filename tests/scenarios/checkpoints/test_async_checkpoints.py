"""Checkpoints that are written while training goes on: the same contents, in order, and no error is lost.

The writer waits until it is let go, so that training is known to have gone on before anything is written.
"""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils._pytree import keystr, tree_flatten_with_path

from lightning_pipe.checkpoints.folder_reading import read_extra_state, read_full_state, read_metadata
from lightning_pipe.engine import SetupError
from tests.distributed import run_ranks
from tests.patience import HANG
from tests.strategies import llm_cases
from tests.strategies.cases import Clicks, fit, recsys

EVERY = 2  # steps between two checkpoints
STEPS = 6
SPLITS: dict[str, dict[str, int]] = {
    "stages": {},
    "shards": {"pp": 1, "dp_shard": 2},
}


class Gate:
    """Lets one save through each time that it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def pass_through(self) -> None:
        assert self._open.wait(HANG), "training waited for the save that waits for training"
        self._open.clear()


@contextmanager
def writing(before: Callable[[], None]) -> Iterator[None]:
    """Something happens before a rank's files are written."""
    write_data = dcp.FileSystemWriter.write_data

    def write(*args: Any, **kwargs: Any) -> Any:
        before()
        return write_data(*args, **kwargs)

    with mock.patch.object(dcp.FileSystemWriter, "write_data", write):
        yield


class Observer(pl.Callback):
    """Opens the gate once a step was trained after the save began, and at the end; notes what is in the folder then."""

    def __init__(self, gate: Gate, folder: Path) -> None:
        self.gate, self.folder = gate, folder
        self.seen: dict[int, set[str]] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step > EVERY and trainer.global_step % EVERY == 1:
            self.seen[trainer.global_step] = names(self.folder)
            dist.barrier()  # before any rank's writer goes on
            self.gate.open()

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        self.gate.open()


class Failing(pl.Callback):
    """Raises while a save is under way."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == EVERY + 1:
            self.gate.open()
            raise ValueError("of the user")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def keeping(folder: Path, *callbacks: pl.Callback, **options: Any) -> dict[str, Any]:
    """The trainer's arguments for keeping a checkpoint every few steps."""
    callback = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=EVERY, **options)
    return {"enable_checkpointing": True, "default_root_dir": folder, "callbacks": [*callbacks, callback]}


# ---------------------------------------------------------------------- two ranks


def on_two_ranks(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    fit(Clicks(), recsys(), **keeping(folder / "waiting", save_top_k=-1))
    results: dict[str, Any] = {}
    for name, options in (("all", {"save_top_k": -1}), ("newest", {})):
        gate = Gate()
        observer = Observer(gate, folder / name)
        with writing(gate.pass_through):
            fit(Clicks(), recsys(async_checkpoints=True), **keeping(folder / name, observer, **options))
        results[name] = observer.seen
    dist.barrier()
    results["left"] = names(folder / "newest")
    results["errors"] = _errors(rank, folder)
    for name, sizes in SPLITS.items():
        for waiting in (True, False):
            strategy = llm_cases.llm(async_checkpoints=not waiting, **sizes)
            kept = keeping(folder / f"{name}{waiting}")
            llm_cases.fit(llm_cases.Tiny(), strategy, llm_cases.row_batches(STEPS), **kept)
    return results


def _errors(rank: int, folder: Path) -> dict[str, Any]:
    def no_room() -> None:
        if rank == 1:
            raise OSError("no room")

    saves: list[None] = []

    def no_room_for_the_last() -> None:
        saves.append(None)
        if len(saves) == STEPS // EVERY:
            no_room()

    def error_of(kind: type[Exception], name: str, *callbacks: pl.Callback) -> Exception:
        with pytest.raises(kind) as caught:
            fit(Clicks(), recsys(async_checkpoints=True), **keeping(folder / name, *callbacks))
        return caught.value

    errors: dict[str, Any] = {}
    with writing(no_room):
        errors["first"] = str(error_of(SetupError, "first"))
    with writing(no_room_for_the_last):
        errors["last"] = str(error_of(SetupError, "last"))
    gate = Gate()
    with writing(gate.pass_through):
        errors["of the user"] = str(error_of(ValueError, "user", Failing(gate)))

    def no_room_behind_the_gate() -> None:
        gate.pass_through()
        no_room()

    with writing(no_room_behind_the_gate):
        errors["of both"] = getattr(error_of(ValueError, "both", Failing(gate)), "__notes__", [])
    link = keeping(folder / "link", save_last="link")
    with pytest.raises(SetupError) as caught:
        fit(Clicks(), recsys(async_checkpoints=True), **link)
    errors["link"] = str(caught.value)
    dist.barrier()
    errors["left"] = {name: names(folder / name) for name in ("first", "last", "user", "both")}
    return errors


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("async")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(on_two_ranks, 2, folder)


def contents(path: Path) -> dict[str, Any]:
    """By its path in the checkpoint; but for where ModelCheckpoint keeps others."""
    saved = read_metadata(path, ("model", "state_dict"), "somehow")
    rest = {key: value for key, value in read_extra_state(path, None).items() if key != "callbacks"}
    with tempfile.TemporaryDirectory() as beside:
        whole = {**rest, **read_full_state(path, saved, True, None, Path(beside))}
        return {keystr(where): copy(value) for where, value in tree_flatten_with_path(whole)[0]}


def copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """What is not in both, or differs in any bit."""

    def equal(a: Any, b: Any) -> bool:
        return torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else bool(a == b)

    same = {key for key in one.keys() & other.keys() if equal(one[key], other[key])}
    return (one.keys() | other.keys()) - same


def test_what_is_saved_is_what_was_there_when_it_was_saved(ranks: list[dict[str, Any]], folder: Path) -> None:
    steps = range(EVERY, STEPS + 1, EVERY)
    for kept in ("waiting", "all"):
        assert names(folder / kept) == {f"step={step}.ckpt" for step in steps}
    for step in steps:
        found, expected = (contents(folder / kept / f"step={step}.ckpt") for kept in ("all", "waiting"))
        assert differing(found, expected) == set()
    # And the next steps changed all of it, while it was being written.
    others = differing(*(contents(folder / "all" / f"step={step}.ckpt") for step in (2, 4)))
    assert {key for key in found if "['model']" in key} < others


@pytest.mark.parametrize("split", SPLITS)
def test_of_stages_and_shards_too(split: str, ranks: list[dict[str, Any]], folder: Path) -> None:
    (name,) = names(folder / f"{split}True")
    found, expected = (contents(folder / f"{split}{waiting}" / name) for waiting in (False, True))
    assert differing(found, expected) == set()


def test_training_goes_on_while_a_checkpoint_is_written(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["all"] == {3: set(), 5: {"step=2.ckpt"}}


def test_the_old_checkpoint_is_there_until_the_new_one_is(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["newest"] == {3: set(), 5: {"step=2.ckpt"}}
        assert result["left"] == {"step=6.ckpt"}


@pytest.mark.parametrize("case", ["first", "last"])
def test_what_went_wrong_is_raised_on_every_rank(case: str, ranks: list[dict[str, Any]]) -> None:
    """At the next save, or at the end; what was there before is not removed."""
    for result in ranks:
        step = {"first": EVERY, "last": STEPS}[case]
        assert f"step={step}.ckpt' cannot be written: no room (on rank 1)." in result["errors"][case]
        assert result["errors"]["left"][case] == {"first": set(), "last": {"step=4.ckpt"}}[case]


def test_an_error_of_the_users_waits_for_the_save_under_way(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert result["errors"]["of the user"] == "of the user"
        assert result["errors"]["left"]["user"] == {"step=2.ckpt"}
        where, note = result["errors"]["of both"]
        assert re.match(r"batch \d of epoch \d failed on rank \d", where)
        assert "step=2.ckpt' cannot be written: no room (on rank 1)." in note
        assert result["errors"]["left"]["both"] == set()


def test_a_link_to_what_is_not_there_yet_is_refused(ranks: list[dict[str, Any]]) -> None:
    for result in ranks:
        assert "save_last='link', but with async_checkpoints=True" in result["errors"]["link"]
