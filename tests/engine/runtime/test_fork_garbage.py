"""A forked process does not destroy what its parent has thrown away."""

from __future__ import annotations

import gc
import multiprocessing
from typing import Any

import pytest
import torch.distributed as dist

from lightning_pipe.engine.runtime.fork_garbage import _Freezer, keep_garbage_from_forks
from tests.distributed import run_ranks
from tests.patience import HANG


class Thrown:
    """Part of a reference cycle; notes in a queue that it is destroyed."""

    def __init__(self, destroyed: Any) -> None:
        self.destroyed, self.itself = destroyed, self

    def __del__(self) -> None:
        self.destroyed.put("destroyed")


def collect(destroyed: Any) -> None:
    gc.collect()
    destroyed.put("collected")


def fork_with_garbage(rank: int, world_size: int) -> tuple[str, int | None]:
    gc.disable()
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    thrown = Thrown(told)
    group = dist.new_group()
    cycle: list[Any] = [group, thrown]
    cycle.append(cycle)
    dist.destroy_process_group(group)
    keep_garbage_from_forks()
    del group, cycle, thrown
    worker = context.Process(target=collect, args=(told,), daemon=True)
    worker.start()
    first = told.get(timeout=HANG)
    worker.join(HANG)
    gc.enable()
    return first, worker.exitcode


def test_a_forked_process_leaves_its_parents_garbage_alone() -> None:
    assert run_ranks(fork_with_garbage, 1) == [("collected", 0)]


@pytest.fixture
def nothing_frozen() -> Any:
    assert gc.get_freeze_count() == 0
    yield
    gc.unfreeze()


def test_the_parent_collects_again_after_the_fork(nothing_frozen: Any) -> None:
    freezer = _Freezer()
    freezer.freeze()
    assert gc.get_freeze_count() > 0
    freezer.unfreeze()
    assert gc.get_freeze_count() == 0


def test_what_a_program_has_frozen_stays_frozen(nothing_frozen: Any) -> None:
    frozen = [object()]
    gc.freeze()
    freezer = _Freezer()
    freezer.freeze()
    freezer.unfreeze()
    assert not any(one is frozen for one in gc.get_objects())
