"""Ctrl-C while a checkpoint is written in the background: its thread ends before its process group does."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_pipe.checkpoints.background_save import BackgroundSave
from lightning_pipe.engine import SetupError
from lightning_pipe.strategies.checkpoint_folder import FolderCheckpointStrategy
from tests.distributed import run_ranks
from tests.patience import HANG

# How long (seconds) the writer gives the main thread to destroy the group that it must not destroy.
_CHANCE = 1.0


def _interrupted(when: str, *arguments: Any) -> list[str]:
    """What happens, in order, when a rank is interrupted where it waits for its writer."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log: list[str] = []
    waits, destroys = threading.Event(), threading.Event()
    saves = BackgroundSave()
    strategy: Any = FolderCheckpointStrategy(async_checkpoints=True)
    strategy._saves = saves

    def write() -> None:
        assert waits.wait(HANG)
        os.kill(os.getpid(), signal.SIGINT)
        destroys.wait(_CHANCE)
        dist.all_reduce(torch.ones(1), group=saves.group)
        log.append("written")

    def wait(original: Any = saves.wait) -> None:
        waits.set()
        original()

    def destroy(group: dist.ProcessGroup, original: Any = dist.destroy_process_group) -> None:
        log.append("destroyed")
        destroys.set()
        original(group)

    saves.start(write)
    saves.add_success_callback(lambda: log.append("removed"))
    with mock.patch.object(saves, "wait", wait), mock.patch.object(dist, "destroy_process_group", destroy):
        with pytest.raises(KeyboardInterrupt):
            getattr(strategy, when)(*arguments)
        # As Lightning does after an interrupt.
        strategy.on_exception(KeyboardInterrupt())
    return log


def _failed() -> list[str]:
    strategy: Any = FolderCheckpointStrategy(async_checkpoints=True)
    strategy._saves = saves = BackgroundSave()
    log: list[str] = []

    def write() -> None:
        raise SetupError("no room")

    saves.start(write)
    saves.add_success_callback(lambda: log.append("removed"))
    with pytest.raises(SetupError, match="no room"):
        strategy.on_train_end()
    strategy.on_train_end()
    return log


def _on_two_ranks(rank: int, world_size: int) -> tuple[list[str], list[str], list[str]]:
    return _interrupted("on_train_end"), _interrupted("on_exception", ValueError("of the user")), _failed()


@pytest.fixture(scope="module")
def logs() -> list[tuple[list[str], list[str], list[str]]]:
    return run_ranks(_on_two_ranks, 2)


@pytest.mark.parametrize("place", [0, 1], ids=["at the end of training", "behind an error"])
def test_an_interrupt_while_a_rank_waits_lets_the_writer_end_before_its_group_is_destroyed(
    place: int, logs: list[Any]
) -> None:
    # What was to follow the save follows it, or is left out.
    for log in logs:
        assert [entry for entry in log[place] if entry != "removed"] == ["written", "destroyed"]


def test_the_error_of_a_save_is_raised_once_and_what_was_to_follow_is_left_out(logs: list[Any]) -> None:
    assert [failed for *_, failed in logs] == [[], []]
