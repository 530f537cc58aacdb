"""Ranks that come to a checkpoint after an error: all agree whether it is written, in whatever order they come."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from itertools import permutations
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_pipe.loops import interrupted_save
from tests.patience import HANG


class _Rank:
    """One rank's view of a store, each of whose operations waits for its turn; a wait for keys times out at once."""

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = store
        self._turn, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self.answer: bool | None = None
        self._thread = threading.Thread(target=self._run, args=(rank, world_size))
        self._thread.start()
        assert self._stands.acquire(timeout=HANG)

    def step(self) -> None:
        """Do the next operation, if there is one, and come to the one after."""
        if self._thread.is_alive() and self.answer is None:
            self._turn.release()
            assert self._stands.acquire(timeout=HANG)

    def end(self) -> None:
        """Do all operations that are left."""
        while self.answer is None:
            self.step()
        self._thread.join()

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self._await_turn()
        if not self._store.check(list(keys)):
            raise dist.DistStoreError("timed out")

    def __getattr__(self, name: str) -> Any:
        def operation(*args: Any) -> Any:
            self._await_turn()
            return getattr(self._store, name)(*args)

        return operation

    def _await_turn(self) -> None:
        self._stands.release()
        assert self._turn.acquire(timeout=HANG)

    def _run(self, rank: int, world_size: int) -> None:
        try:
            self.answer = interrupted_save._agree(self, "key", rank, world_size)  # type: ignore[arg-type]
        finally:
            self._stands.release()


def _orders(world_size: int, operations: int) -> set[tuple[int, ...]]:
    """All orders of so many operations of each rank."""
    return set(permutations([rank for rank in range(world_size) for _ in range(operations)]))


@pytest.mark.parametrize(("world_size", "operations"), [(2, 4), (3, 3)])
def test_all_ranks_come_to_one_answer_in_any_order_of_their_operations(world_size: int, operations: int) -> None:
    answers = set()
    for order in sorted(_orders(world_size, operations)):
        store = dist.HashStore()
        ranks = [_Rank(store, rank, world_size) for rank in range(world_size)]
        for rank in order:
            ranks[rank].step()
        for one in ranks:
            one.end()
        assert len({one.answer for one in ranks}) == 1, f"in the order {order}: {[one.answer for one in ranks]}"
        answers.add(ranks[0].answer)
    assert answers == {True, False}  # both have been tried


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
