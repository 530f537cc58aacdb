"""Timing on a machine that others use too: a run is repeated when it was disturbed.

A run counts as disturbed when others had more than 3 % of the cores while it lasted and its threads, ready to go on,
waited for a core for more than 2 % of the time. Where the system does not say so (all but Linux) no run is.
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
_PAUSE = 0.05  # seconds between two looks at a busy machine


class QuietRuns:
    """Runs things while nobody else does much.

    Args:
        patience: seconds to wait, over the life of this object, for others to stop.

    Attributes:
        disturbed: how many runs stayed disturbed in all repetitions.
    """

    def __init__(self, patience: float = 60.0) -> None:
        self._patience = patience
        self.disturbed = 0

    def run(self, body: Callable[[], T]) -> T:
        """What *body* returns, of the first run that nobody disturbed, or of the least disturbed of five.

        Threads that it uses are there before it and after it.
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
    """What others had of the machine since this was made, and what of it was this process's loss."""

    def __init__(self) -> None:
        self._begun, self._idle, self._own, self._waited = time.perf_counter(), _idle(), time.process_time(), _waited()

    def disturbed(self) -> bool:
        return self.used_by_others() and self.waited() > _WAITED

    def waited(self) -> float:
        """For how long threads waited for a core, as a part of the time."""
        return (_waited() - self._waited) / (time.perf_counter() - self._begun)

    def used_by_others(self) -> bool:
        before, now = self._idle, _idle()
        if before is None or now is None:
            return False
        available = (time.perf_counter() - self._begun) * (os.cpu_count() or 1)
        used = available - (now - before) - (time.process_time() - self._own)
        # The system counts in ticks: one of them says nothing.
        return used > _SHARE * available + 1 / os.sysconf("SC_CLK_TCK")


def _idle() -> float | None:
    """Seconds for which the cores were idle so far, together; None where the system does not say."""
    try:
        ticks = Path("/proc/stat").read_text().splitlines()[0].split()[4:6]
    except OSError:
        return None
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def _waited() -> float:
    """Seconds for which this process's threads, ready to go on, waited for a core so far, together."""
    return sum(int(path.read_text().split()[1]) for path in Path("/proc/self/task").glob("*/schedstat")) * 1e-9
