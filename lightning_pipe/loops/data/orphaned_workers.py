"""Watchdog that ends the workers of a dataloader soon after their rank was killed.

PyTorch's workers check that their parent is alive while they wait for indices. The check fails in two cases: a worker
whose parent is killed before the first check takes its new parent process for the original one, and a worker that sends
more data than a pipe holds waits for a reader and does not check. Such workers keep copies of the rank's sockets open.
The other ranks would therefore not detect the loss of the rank, and would wait until their timeout.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from multiprocessing import parent_process
from typing import Any

from torch.utils.data import DataLoader

# Seconds between two checks, as in PyTorch's workers.
_PERIOD = 5.0


class OrphanedWorkerWatchdog:
    """``worker_init_fn`` of a loader that makes a worker end after its rank."""

    def __init__(self, init_fn: Callable[[int], object] | None) -> None:
        self.user_init_fn = init_fn

    def __call__(self, worker: int) -> None:
        threading.Thread(
            target=_exit_when_parent_dies, args=(os.getppid(),), name="watches the rank", daemon=True
        ).start()
        if self.user_init_fn is not None:
            self.user_init_fn(worker)


def end_workers_with_process(loader: Any) -> Any:
    """Make the workers of a loader end after this process, and return the loader."""
    if (
        isinstance(loader, DataLoader)
        and loader.num_workers
        and not isinstance(loader.worker_init_fn, OrphanedWorkerWatchdog)
    ):
        loader.worker_init_fn = OrphanedWorkerWatchdog(loader.worker_init_fn)
    return loader


def _exit_when_parent_dies(parent: int) -> None:
    rank = parent_process()
    assert rank is not None
    # If a server forks the workers, or if the rank was killed before this call, the parent is another process.
    while os.getppid() == parent and (parent == rank.pid or rank.is_alive()):
        time.sleep(_PERIOD)
    os._exit(1)
