"""Run by torchrun on two ranks: a collective ends on rank 0 while its interpreter exits and holds the GIL.

Arguments: what trains (a strategy of ``KINDS``, or a function below: ``worker`` leaves a collective to a worker that is
not closed), how the program ends (``well`` or ``error``), and a folder.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from pathlib import Path

USE, END, FOLDER = sys.argv[1:]
EXITS = Path(FOLDER) / "exits"
RANK = int(os.environ["RANK"])

if RANK == 0:
    # Handlers run in reverse order of registration, and importing PyTorch registers more of them. The first one runs
    # right before the interpreter finalizes. It sleeps without releasing the GIL, which the thread of the collective
    # has to wait for.
    atexit.register(ctypes.PyDLL(None).usleep, 2_000_000)
    atexit.register(EXITS.touch)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from lightning_pipe.engine.ranks.tensors_at_exit import keep_tensors_alive_at_exit  # noqa: E402
from lightning_pipe.engine.runtime.worker import Worker  # noqa: E402
from tests.scenarios.faults.training import KINDS, fit, module  # noqa: E402


def sum_over_ranks() -> None:
    dist.all_reduce(torch.ones(3))


def worker() -> None:
    # The strategies, TrainPipeline and StageRunner call it too; a worker alone makes no process group.
    keep_tensors_alive_at_exit()
    dist.init_process_group("gloo")


if __name__ == "__main__":
    if USE in KINDS:
        fit(USE, 2, module(USE))
    else:
        worker()
    # Without this reference, the destructor of the group would wait for its threads.
    group = dist.group.WORLD
    if RANK == 0 and USE != "worker":
        dist.all_reduce(torch.ones(3), async_op=True)
    elif RANK == 0:
        Worker("unclosed").submit(sum_over_ranks)
        atexit.register(EXITS.touch)
    else:
        while not EXITS.exists():
            threading.Event().wait(0.01)
        sum_over_ranks()
    if RANK == 0 and END == "error":
        raise ValueError("on purpose")
