"""Ctrl-C ends training in an orderly way; SIGTERM does behind a batch, where a checkpoint goes on exactly."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipe.checkpoints.background_save import BackgroundSave
from tests.scenarios.faults.forked_ranks import Ended, Here, Nursery, told
from tests.scenarios.faults.left_behind import left_behind
from tests.scenarios.faults.training import BOUND, KINDS, final_state, fit, loader, module
from tests.strategies.cases import difference
from tests.tiers import sampled, sampled_rows


class Signal(Callback):
    """Sends a signal to this process, in the middle of a batch."""

    def __init__(self, number: int, here: Here, batch: int = 1) -> None:
        self.number, self.here, self.batch = number, here, batch

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch and trainer.current_epoch == 0:
            self.here.note_fault()
            os.kill(os.getpid(), self.number)


# ---------------------------------------------------------------------- SIGTERM


def terminated(here: Here, kind: str, received: dict[int, int]) -> tuple[int, list[str]]:
    """How many batches a run trained that was ended, and what differs between one that was not and one that goes on.

    Args:
        here: this rank.
        kind: of KINDS.
        received: the ranks that get the signal, and in which batch.
    """
    stopped, path = module(kind), here.folder / "on_exception.ckpt"
    callbacks: list[Callback] = [OnExceptionCheckpoint(here.folder)]
    if here.rank in received:
        callbacks.append(Signal(signal.SIGTERM, here, received[here.rank]))

    def train(trained: Any, **options: Any) -> pl.Trainer:
        return fit(kind, here.world_size, trained, loader(kind, shuffle=True), max_epochs=2, **options)

    with pytest.raises(SIGTERMException):
        train(
            stopped,
            callbacks=callbacks,
            enable_checkpointing=True,
            default_root_dir=here.folder,
        )
    resumed, whole = module(kind), module(kind)
    after, undisturbed = train(resumed, ckpt_path=path), train(whole)
    assert stopped.losses + resumed.losses == whole.losses
    return len(stopped.losses), difference(final_state(kind, after), final_state(kind, undisturbed))


def check_terminated(ended: list[Ended], within: int) -> None:
    assert [one.code for one in ended] == [0] * len(ended), told(ended)
    (trained,) = {one.value[0] for one in ended}
    assert 2 <= trained <= within
    assert [one.value[1] for one in ended] == [[]] * len(ended)


@pytest.mark.parametrize("kind", sampled(KINDS, lambda kind: kind != "llm"))
def test_a_checkpoint_on_sigterm_goes_on_exactly(kind: str, ranks: Nursery) -> None:
    check_terminated(ranks.run(terminated, 1, kind, {0: 1}), within=2)


@pytest.mark.parametrize(
    ("kind", "received"),
    [
        pytest.param("pipeline", {1: 1}, id="pipeline, rank 1 alone"),
        pytest.param("recsys", {0: 1}, id="recsys, rank 0 alone"),
        pytest.param("recsys", {1: 1}, id="recsys, rank 1 alone", marks=pytest.mark.exhaustive),
        pytest.param("recsys", {0: 1, 1: 1}, id="recsys, both at once"),
        pytest.param("recsys", {0: 1, 1: 2}, id="recsys, both in turn"),
        pytest.param("llm", {1: 1}, id="llm, rank 1 alone"),
    ],
)
def test_ranks_end_behind_the_same_batch_and_go_on_exactly(kind: str, received: dict[int, int], ranks: Nursery) -> None:
    # Ranks tell each other with the batches that they read ahead.
    check_terminated(ranks.run(terminated, 2, kind, received), within=5)


# ---------------------------------------------------------------------- Ctrl-C


def interrupted_alone(here: Here, kind: str) -> tuple[Any, list[str], bool]:
    whole = module(kind)
    fit(kind, 1, whole)
    stopped, threads = module(kind), threading.enumerate()
    code: Any = "none"
    try:
        fit(kind, 1, stopped, callbacks=[Signal(signal.SIGINT, here)])
    except SystemExit as error:
        code = error.code
    left = left_behind(stopped, threads)
    again = module(kind)
    fit(kind, 1, again)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    return code, left, again.losses == whole.losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_trains_again_after_ctrl_c(kind: str, ranks: Nursery) -> None:
    (ended,) = ranks.run(interrupted_alone, 1, kind)
    assert ended.code == 0, told([ended])
    assert ended.value == (1, [], True)


class SaveAtEnd(Callback):
    """Begins a checkpoint behind the last batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            trainer.save_checkpoint(self.path)


def interrupted_while_it_writes(here: Here, kind: str) -> tuple[Any, list[str], list[str], bool]:
    stopped, threads, path = module(kind), threading.enumerate(), here.folder / "a.ckpt"
    waits, original_wait, original_write = threading.Event(), BackgroundSave.wait, dcp.FileSystemWriter.write_data

    def wait(saves: BackgroundSave) -> None:
        if saves.under_way:
            waits.set()
        original_wait(saves)

    def write(*args: Any, **kwargs: Any) -> Any:
        assert waits.wait(BOUND)
        here.note_fault()
        os.kill(os.getpid(), signal.SIGINT)
        return original_write(*args, **kwargs)

    code: Any = "none"
    asynchronous = {"timeout": timedelta(seconds=BOUND), "async_checkpoints": True}
    with (
        mock.patch.object(BackgroundSave, "wait", wait),
        mock.patch.object(dcp.FileSystemWriter, "write_data", write),
    ):
        try:
            fit(kind, here.world_size, stopped, callbacks=[SaveAtEnd(path)], strategy=asynchronous)
        except SystemExit as error:
            code = error.code
    left = left_behind(stopped, threads)
    resumed, whole = module(kind), module(kind)
    fit(kind, here.world_size, resumed, ckpt_path=path, max_epochs=2)
    fit(kind, here.world_size, whole, max_epochs=2)
    return code, left, sorted(one.name for one in here.folder.glob("*.ckpt*")), resumed.losses == whole.losses[6:]


@pytest.mark.parametrize("kind", sampled(["recsys", "llm"], lambda kind: kind == "recsys"))
def test_ctrl_c_while_a_checkpoint_is_written_leaves_it_whole(kind: str, ranks: Nursery) -> None:
    ended = ranks.run(interrupted_while_it_writes, 2, kind)
    assert [one.code for one in ended] == [0, 0], told(ended)
    assert [one.value for one in ended] == [(1, [], ["a.ckpt"], True)] * 2, told(ended)


def interrupted(here: Here, kind: str, receivers: tuple[int, ...]) -> None:
    fit(kind, 2, module(kind), callbacks=[Signal(signal.SIGINT, here)] if here.rank in receivers else [])


@pytest.mark.parametrize(
    ("kind", "receivers"),
    sampled_rows(product(KINDS, ((1,), (0, 1))), lambda case: (case[0] == "recsys") == (len(case[1]) == 2)),
)
def test_ctrl_c_ends_all_ranks_soon(kind: str, receivers: tuple[int, ...], ranks: Nursery) -> None:
    ended = ranks.run(interrupted, 2, kind, receivers)
    assert [one.code for one in ended] == [1, 1], told(ended)
    assert max(one.seconds for one in ended) < BOUND, told(ended)
