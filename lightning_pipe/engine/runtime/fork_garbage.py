"""Garbage collection in forked processes.

The workers of a DataLoader are forked. A forked process has a copy of each object of its parent, but only one thread.
If a Gloo process group is part of a reference cycle that the parent has not collected yet, the worker's garbage
collector destroys the copy, and the destructor hangs: it waits for threads that do not exist (seen with PyTorch 2.13).
"""

from __future__ import annotations

import gc
import os
from functools import cache

__all__ = ["keep_garbage_from_forks"]


@cache
def keep_garbage_from_forks() -> None:
    """Exclude the parent's objects from garbage collection in all processes forked later.

    Before a fork, ``gc.freeze`` moves all objects to a generation that is never collected. The parent moves them back
    after the fork. Does nothing if the program itself has frozen objects. Installed once per process.
    """
    if hasattr(os, "register_at_fork"):
        freezer = _Freezer()
        os.register_at_fork(before=freezer.freeze, after_in_parent=freezer.unfreeze)


class _Freezer:
    def __init__(self) -> None:
        self._has_frozen = False

    def freeze(self) -> None:
        self._has_frozen = not gc.get_freeze_count()
        if self._has_frozen:
            gc.freeze()

    def unfreeze(self) -> None:
        if self._has_frozen:
            gc.unfreeze()
