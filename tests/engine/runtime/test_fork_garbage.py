"""A forked process does not destroy what its parent has thrown away."""

from __future__ import annotations

import gc
import multiprocessing
from typing import Any

import torch.distributed as dist

from lightning_pipe.engine.runtime.fork_garbage import freeze_gc_in_forks
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
    freeze_gc_in_forks()
    del group, cycle, thrown
    worker = context.Process(target=collect, args=(told,), daemon=True)
    worker.start()
    first = told.get(timeout=HANG)
    worker.join(HANG)
    gc.enable()
    return first, worker.exitcode


def test_a_forked_process_leaves_its_parents_garbage_alone() -> None:
    assert run_ranks(fork_with_garbage, 1) == [("collected", 0)]
