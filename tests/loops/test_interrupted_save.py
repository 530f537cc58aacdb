"""Ranks that come to a checkpoint after an error: all agree whether it is written, in whatever order they come."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest

from lightning_pipe.loops import interrupted_save


class _Interrupted:
    """As much of a trainer."""

    interrupted, world_size, global_rank = True, 2, 0

    def __init__(self, saved: list[str], batches: int = 1) -> None:
        self._saved = saved
        self.fit_loop = mock.Mock(**{"epoch_loop.batch_progress.total.ready": batches})

    def save_checkpoint(self, path: str) -> None:
        self._saved.append(path)


def test_an_error_before_the_first_batch_keeps_the_checkpoint_that_was_to_be_loaded() -> None:
    saved: list[str] = []
    trainer: Any = _Interrupted(saved, batches=0)
    interrupted_save.install_all_ranks_save_check(trainer)
    with pytest.warns(UserWarning, match="training had not begun"):
        trainer.save_checkpoint("a")
    assert saved == []


def test_a_store_that_never_answers_is_not_waited_for() -> None:
    released = threading.Event()
    store: Any = mock.Mock(**{"set.side_effect": lambda *_: released.wait()})
    with mock.patch.object(interrupted_save, "_WAIT", timedelta(seconds=0.01)):
        assert not interrupted_save._wait_for_all_ranks(store, "key", 0, 2)
    released.set()
