"""Workers of a loader end soon after the rank that started them was killed, whatever they are doing then.

PyTorch's look for their parent while they wait for indices. Two kinds never do: a worker whose parent is killed before
it first looks takes the process that it was handed to for its parent; and one that sends more than a pipe holds waits
for a reader. Both hold copies of the rank's sockets, by which the other ranks would see that it has gone: they would
wait for it until their own timeout.

Tested in ``tests/scenarios/faults/test_orphaned_workers.py``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from multiprocessing import parent_process
from typing import Any

from torch.utils.data import DataLoader

__all__ = ["EndsWithRank", "ending_with_rank"]

# Seconds between two looks, as in PyTorch's workers.
_PERIOD = 5.0


class EndsWithRank:
    """A loader's ``worker_init_fn`` that has the worker end after its rank.

    Args:
        then: the user's own, called with the worker's number.
    """

    def __init__(self, then: Callable[[int], object] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        threading.Thread(target=_watch, args=(os.getppid(),), name="watches the rank", daemon=True).start()
        if self.then is not None:
            self.then(worker)


def ending_with_rank(loader: Any) -> Any:
    """The same loader, whose workers end after this process."""
    if isinstance(loader, DataLoader) and loader.num_workers and not isinstance(loader.worker_init_fn, EndsWithRank):
        loader.worker_init_fn = EndsWithRank(loader.worker_init_fn)
    return loader


def _watch(parent: int) -> None:
    rank = parent_process()
    assert rank is not None
    # Where a server forks the workers, or the rank was killed before this began, the parent is another process.
    while os.getppid() == parent and (parent == rank.pid or rank.is_alive()):
        time.sleep(_PERIOD)
    os._exit(1)
