"""Garbage collection in forked processes.

The workers of a DataLoader are forked. A forked process has a copy of each object of its parent, but only one thread.
If a Gloo process group is part of a reference cycle that the parent has not collected yet, the worker's garbage
collector destroys the copy, and the destructor hangs: it waits for threads that do not exist (seen with PyTorch 2.13).
"""

from __future__ import annotations

import gc
import os
import threading
from functools import cache


@cache
def freeze_gc_in_forks() -> None:
    """Exclude the parent's objects from garbage collection in all processes forked later: they call ``gc.freeze``."""
    if hasattr(os, "register_at_fork"):
        forks = _ForkGCHooks()
        os.register_at_fork(
            before=forks.before_fork,
            after_in_parent=forks.after_fork_in_parent,
            after_in_child=forks.after_fork_in_child,
        )


class _ForkGCHooks:
    """Forks under way, which several threads may start at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._collects = False  # True if the collector was enabled before the forks

    def before_fork(self) -> None:
        with self._lock:
            if not self._count:
                self._collects = gc.isenabled()
                gc.disable()
            self._count += 1

    def after_fork_in_parent(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and self._collects:
                gc.enable()

    def after_fork_in_child(self) -> None:
        self._lock, self._count = threading.Lock(), 0  # another thread of the parent may have held the lock
        gc.freeze()
        if self._collects:
            gc.enable()
