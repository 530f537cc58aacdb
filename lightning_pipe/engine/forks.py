"""Forked processes that leave the parent's garbage alone.

A loader's workers are forked. The fork has a copy of each object of its parent, but none of its threads. If a process
group of Gloo is part of a reference cycle that the parent has not collected yet, the worker's garbage collector
destroys the copy, and the destructor waits for ever for threads that do not exist (seen with PyTorch 2.13).
"""

from __future__ import annotations

import gc
import os
from functools import cache

__all__ = ["keep_garbage_from_forks"]


@cache
def keep_garbage_from_forks() -> None:
    """Exclude the present objects from garbage collection in processes that are forked from now on.

    ``gc.freeze`` moves them to a generation that is never collected; the parent moves them back after the fork. A
    program that has frozen objects itself is left alone. Applies to this process, once.
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
