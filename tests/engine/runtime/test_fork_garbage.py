"""A forked process does not destroy what its parent has thrown away."""

from __future__ import annotations

import gc
import multiprocessing
from typing import Any

import torch.distributed as dist

from lightning_pipe.engine.runtime.fork_garbage import _Forks, keep_garbage_from_forks
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


def state_after_fork(enabled: bool) -> tuple[list[bool], list[bool]]:
    """Whether the collector is enabled, and whether nothing was frozen: in the parent and in the child.

    Objects that were frozen before may have been freed.
    """
    context = multiprocessing.get_context("fork")
    told = context.Queue()
    frozen = gc.get_freeze_count()
    (gc.enable if enabled else gc.disable)()
    child = context.Process(target=report, args=(told, frozen), daemon=True)
    child.start()
    found = told.get(timeout=HANG)
    child.join(HANG)
    return [gc.isenabled(), gc.get_freeze_count() <= frozen], found


def report(told: Any, frozen: int) -> None:
    told.put([gc.isenabled(), gc.get_freeze_count() <= frozen])


def on_rank(rank: int, world_size: int) -> list[Any]:
    keep_garbage_from_forks()
    found = [state_after_fork(True), state_after_fork(False)]
    gc.enable()
    return found


def test_only_the_child_freezes_and_the_collector_is_enabled_as_before() -> None:
    (found,) = run_ranks(on_rank, 1)
    assert found == [([True, True], [True, False]), ([False, True], [False, False])]


def test_forks_of_two_threads_at_once_leave_the_collector_enabled() -> None:
    assert gc.isenabled()
    forks = _Forks()
    try:
        forks.begin()
        forks.begin()
        forks.end_in_parent()
        assert not gc.isenabled()  # the other fork is still under way
        forks.end_in_parent()
        assert gc.isenabled()
    finally:
        gc.enable()
