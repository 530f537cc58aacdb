"""Ctrl-C ends training in an orderly way; SIGTERM does behind a batch, where a checkpoint goes on exactly."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import nullcontext
from datetime import timedelta
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
    """How many batches a run trained that was ended, and what differs between one that was not and one that goes on."""
    stopped, path = module(kind), here.folder / "on_exception.ckpt"
    callbacks: list[Callback] = [OnExceptionCheckpoint(here.folder)]
    if here.rank in received:
        callbacks.append(Signal(signal.SIGTERM, here, received[here.rank]))

    def train(trained: Any, **options: Any) -> pl.Trainer:
        return fit(kind, here.world_size, trained, loader(kind, shuffle=True), max_epochs=2, **options)

    with pytest.raises(SIGTERMException) as end:
        train(
            stopped,
            callbacks=callbacks,
            enable_checkpointing=True,
            default_root_dir=here.folder,
        )
    if here.world_size > 1:
        # A launcher that got no signal, on another machine, would take 0 for the end of training.
        assert end.value.code == 128 + signal.SIGTERM
    resumed, whole = module(kind), module(kind)
    after, undisturbed = train(resumed, ckpt_path=path), train(whole)
    assert stopped.losses + resumed.losses == whole.losses
    return len(stopped.losses), difference(final_state(kind, after), final_state(kind, undisturbed))


def check_terminated(ended: list[Ended], within: int) -> None:
    assert [one.code for one in ended] == [0] * len(ended), told(ended)
    (trained,) = {one.value[0] for one in ended}
    assert 2 <= trained <= within
    assert [one.value[1] for one in ended] == [[]] * len(ended)


@pytest.mark.parametrize(
    ("kind", "received"),
    [
        pytest.param("pipeline", {1: 1}, id="pipeline, rank 1 alone"),
        pytest.param("recsys", {0: 1}, id="recsys, rank 0 alone"),
        pytest.param("recsys", {0: 1, 1: 2}, id="recsys, both in turn"),
        pytest.param("llm", {1: 1}, id="llm, rank 1 alone"),
    ],
)
def test_ranks_end_behind_the_same_batch_and_go_on_exactly(kind: str, received: dict[int, int], ranks: Nursery) -> None:
    # Ranks tell each other with the batches that they read ahead.
    check_terminated(ranks.run(terminated, 2, kind, received), within=5)


# ---------------------------------------------------------------------- Slurm's signal before it stops a job


def as_job_step(here: Here, status: int) -> None:
    """This rank, as a task of a job step of Slurm, whose ``scontrol`` notes its arguments and ends with *status*."""
    commands = here.folder / "bin"
    if here.rank == 0:
        commands.mkdir()
        command = commands / "scontrol"
        command.write_text(f'#!/bin/sh\necho "$@" >> {here.folder}/requeued\necho no rights >&2\nexit {status}\n')
        command.chmod(0o755)
    rank, size = str(here.rank), str(here.world_size)
    of_slurm = {"JOB_ID": "12", "STEP_ID": "0", "NTASKS": size, "NTASKS_PER_NODE": size, "NNODES": "1", "NODEID": "0"}
    tasks = {**of_slurm, "JOB_NAME": "train", "PROCID": rank, "LOCALID": rank}
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC")]:
        del os.environ[name]
    os.environ.update({f"SLURM_{name}": value for name, value in tasks.items()})
    os.environ["PATH"] = f"{commands}{os.pathsep}{os.environ['PATH']}"


def preempted(here: Here, kind: str, received: dict[int, int], options: dict[str, Any]) -> tuple[int, list[str]]:
    """As `terminated`, for a job that is stopped and goes on by itself. The first rank tells what it asked of Slurm."""
    whole = module(kind)
    undisturbed = fit(kind, here.world_size, whole, loader(kind, shuffle=True), max_epochs=2, **options)
    as_job_step(here, 0)
    stopped, resumed = module(kind), module(kind)
    callbacks = [Signal(signal.SIGUSR1, here, received[here.rank])] if here.rank in received else []

    def train(trained: Any, **more: Any) -> pl.Trainer:
        data = loader(kind, shuffle=True)
        return fit(
            kind, here.world_size, trained, data, max_epochs=2, default_root_dir=here.folder, **{**options, **more}
        )

    with pytest.raises(SIGTERMException):
        train(stopped, callbacks=callbacks)
    assert [path.name for path in here.folder.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    after = train(resumed)
    assert stopped.losses + resumed.losses == whole.losses
    if here.rank == 0:
        assert (here.folder / "requeued").read_text() == "requeue 12\n"
    return len(stopped.losses), difference(final_state(kind, after), final_state(kind, undisturbed))


@pytest.mark.parametrize(
    ("kind", "received", "options"),
    [
        pytest.param("pipeline", {0: 2}, {"accumulate_grad_batches": 2}, id="pipeline, in an accumulation"),
        pytest.param("recsys", {1: 1}, {}, id="recsys, rank 1 alone"),
        pytest.param("llm", {0: 1}, {}, id="llm, rank 0 alone", marks=pytest.mark.exhaustive),
    ],
)
def test_a_job_that_slurm_stops_is_saved_and_requeued_and_goes_on_exactly(
    kind: str, received: dict[int, int], options: dict[str, Any], ranks: Nursery
) -> None:
    size = 1 if kind == "pipeline" else 2
    ended = ranks.run(preempted, size, kind, received, options)
    check_terminated(ended, within=5)
    assert ended[0].value[0] % options.get("accumulate_grad_batches", 1) == 0


def not_requeued(here: Here, kind: str) -> tuple[int, int]:
    as_job_step(here, 1)
    trained, callbacks = module(kind), [Signal(signal.SIGUSR1, here)] if here.rank == 0 else []
    warned = pytest.warns(UserWarning, match="job 12 was not requeued, .* goes on .*: no rights")
    with warned if here.rank == 0 else nullcontext():
        fit(kind, here.world_size, trained, default_root_dir=here.folder, callbacks=callbacks)
    return len(trained.losses), len(list(here.folder.glob("hpc_ckpt_1.ckpt")))


def test_a_job_that_cannot_be_requeued_is_saved_and_goes_on(ranks: Nursery) -> None:
    ended = ranks.run(not_requeued, 2, "recsys")
    assert [one.code for one in ended] == [0, 0], told(ended)
    assert [one.value for one in ended] == [(6, 1)] * 2


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


@pytest.mark.parametrize("kind", ["recsys"])
def test_ctrl_c_while_a_checkpoint_is_written_leaves_it_whole(kind: str, ranks: Nursery) -> None:
    ended = ranks.run(interrupted_while_it_writes, 2, kind)
    assert [one.code for one in ended] == [0, 0], told(ended)
    assert [one.value for one in ended] == [(1, [], ["a.ckpt"], True)] * 2, told(ended)


def interrupted(here: Here, kind: str, receivers: tuple[int, ...]) -> None:
    fit(kind, 2, module(kind), callbacks=[Signal(signal.SIGINT, here)] if here.rank in receivers else [])


@pytest.mark.parametrize(("kind", "receivers"), [("pipeline", (1,)), ("recsys", (0, 1)), ("llm", (1,))])
def test_ctrl_c_ends_all_ranks_soon(kind: str, receivers: tuple[int, ...], ranks: Nursery) -> None:
    ended = ranks.run(interrupted, 2, kind, receivers)
    assert [one.code for one in ended] == [1, 1], told(ended)
    assert max(one.seconds for one in ended) < BOUND, told(ended)
