"""What a training that failed may leave behind: nothing."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from typing import Any

from tests.distributed import threads_left


def left_behind(module: Any, before: list[threading.Thread]) -> list[str]:
    """What training was to take away again: threads, processes, and the forwards that it put into modules."""
    found = [f"thread {name}" for name in threads_left(before)]
    for name, one in module.named_modules():
        if getattr(one.forward, "__func__", None) is not type(one).forward:
            found.append(f"forward of {name or 'the module'}")
    # A dataloader's workers end with its iterator, which an exception and the frames that it came through may hold,
    # and these each other: in Lightning's own loop too.
    gc.collect()
    return found + [f"process {process.name}" for process in multiprocessing.active_children()]
