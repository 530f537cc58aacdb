"""Ranks that come to a checkpoint after an error: all agree whether it is written, in whatever order they come."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_pipe.loops import interrupted_save


class _EveryoneIsThere:
    """A store in which all ranks have come already; notes where it is asked."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def set(self, key: str, value: str) -> None:
        self.keys.append(key)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        pass

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.keys.append(key)
        return desired.encode()


class _Interrupted:
    """As much of a trainer."""

    interrupted, world_size, global_rank = True, 2, 0

    def __init__(self, saved: list[str], batches: int = 1) -> None:
        self._saved = saved
        self.fit_loop = mock.Mock(**{"epoch_loop.batch_progress.total.ready": batches})

    def save_checkpoint(self, path: str) -> None:
        self._saved.append(path)


def test_each_save_of_each_trainer_of_a_process_is_agreed_on_by_itself() -> None:
    # An answer of an earlier one would let a rank in that has come alone.
    saved: list[str] = []
    store = _EveryoneIsThere()
    with (
        mock.patch.object(dist.distributed_c10d, "_get_default_store", return_value=store),
        mock.patch.object(dist, "is_initialized", return_value=True),
    ):
        for _ in range(2):
            trainer: Any = _Interrupted(saved)
            interrupted_save.install_interrupted_saves(trainer)
            for path in "ab":
                try:
                    raise ValueError
                except ValueError:
                    trainer.save_checkpoint(path)
    assert saved == ["a", "b", "a", "b"]
    assert len(set(store.keys)) == len(store.keys) == 8


def test_an_error_before_the_first_batch_keeps_the_checkpoint_that_was_to_be_loaded() -> None:
    saved: list[str] = []
    trainer: Any = _Interrupted(saved, batches=0)
    interrupted_save.install_interrupted_saves(trainer)
    with pytest.warns(UserWarning, match="training had not begun"):
        trainer.save_checkpoint("a")
    assert saved == []


def test_a_store_that_never_answers_is_not_waited_for() -> None:
    released = threading.Event()
    store: Any = mock.Mock(**{"set.side_effect": lambda *_: released.wait()})
    with mock.patch.object(interrupted_save, "_WAIT", timedelta(seconds=0.01)):
        assert not interrupted_save._all_come(store, "key", 0, 2)
    released.set()
