"""Timing on a shared machine: disturbed runs are repeated.

A run counts as disturbed if other processes used more than 3 % of the cores during it and its runnable threads waited
for a core for more than 2 % of the time. On systems without this information (all but Linux), no run counts as
disturbed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_SHARE, _WAITED = 0.03, 0.02
_REPEATS = 5
_PAUSE = 0.05  # seconds between two checks of a busy machine


class QuietRuns:
    """Repeats runs that other processes disturbed.

    Args:
        patience: total time in seconds that this object waits for a quiet machine (default 60).

    Attributes:
        disturbed: number of runs that were disturbed in all repetitions.
    """

    def __init__(self, patience: float = 60.0) -> None:
        self._patience = patience
        self.disturbed = 0

    def run(self, body: Callable[[], T]) -> T:
        """Call *body* until a run is undisturbed, at most five times.

        The threads that *body* uses must exist before and after it.

        Returns:
            The result of the undisturbed run, or of the least disturbed one.
        """
        runs: list[tuple[float, T]] = []
        for _ in range(_REPEATS):
            watch = _Watch()
            result = body()
            if not watch.disturbed():
                return result
            runs.append((watch.waited(), result))
            self._wait_for_quiet()
        self.disturbed += 1
        return min(runs, key=lambda run: run[0])[1]

    def _wait_for_quiet(self) -> None:
        while self._patience > 0:
            watch = _Watch()
            time.sleep(_PAUSE)
            if not watch.used_by_others():
                return
            self._patience -= _PAUSE


class _Watch:
    """Use of the machine by other processes since this object was created, and the delay of this process by it."""

    def __init__(self) -> None:
        self._begun, self._idle, self._process_time, self._waited = (
            time.perf_counter(),
            _idle(),
            time.process_time(),
            _waited(),
        )

    def disturbed(self) -> bool:
        return self.used_by_others() and self.waited() > _WAITED

    def waited(self) -> float:
        """Time that threads waited for a core, as a share of the elapsed time."""
        return (_waited() - self._waited) / (time.perf_counter() - self._begun)

    def used_by_others(self) -> bool:
        before, after = self._idle, _idle()
        if before is None or after is None:
            return False
        available = (time.perf_counter() - self._begun) * (os.cpu_count() or 1)
        used = available - (after - before) - (time.process_time() - self._process_time)
        # The system counts in ticks, so a difference of one tick is not significant.
        return used > _SHARE * available + 1 / os.sysconf("SC_CLK_TCK")


def _idle() -> float | None:
    """Total idle seconds of all cores since boot, or None if the system does not report them."""
    try:
        ticks = Path("/proc/stat").read_text().splitlines()[0].split()[4:6]
    except OSError:
        return None
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _waited() -> float:
    """Total seconds that runnable threads of this process have waited for a core."""
    return sum(int(path.read_text().split()[1]) for path in Path("/proc/self/task").glob("*/schedstat")) * 1e-9
