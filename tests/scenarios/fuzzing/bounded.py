"""Bounds on opening a file that may be hostile: a forked child opens it, and its time, memory and end are measured.

The child is forked from a process that has imported what is needed, so that a file costs milliseconds and not an
import. What a reader may do is in ``docs`` and ``SECURITY.md``: succeed, or raise one of the allowed errors.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests.distributed import fork_preloaded

__all__ = ["MEMORY", "SECONDS", "Outcome", "open_bounded"]

# Of processor time, so that a loaded machine changes nothing; bytes over the size of the file.
SECONDS = 5.0
MEMORY = 200 * 2**20
# Of wall time: the child is then taken for hung.
_HANG = 600.0


@dataclass(frozen=True)
class Outcome:
    """The end of one attempt to open a file."""

    error: str | None
    message: str
    seconds: float
    memory: int
    signal: int | None
    hung: bool
    trace: str = ""
    kinds: tuple[str, ...] = ()

    def check(self, *allowed: type[BaseException], size: int = 0) -> None:
        """Raise AssertionError unless the attempt succeeded or raised one of *allowed* itself, within the bounds."""
        assert not self.hung, f"did not end within {_HANG:g} s"
        assert self.signal is None, f"ended by signal {self.signal}"
        names = {f"{kind.__module__}.{kind.__qualname__}" for kind in allowed}
        assert self.error is None or not names.isdisjoint(self.kinds), (
            f"raised {self.error}: {self.message}\n{self.trace}"
        )
        assert self.seconds <= SECONDS, f"took {self.seconds:.1f} s of processor time, expected at most {SECONDS:g}"
        limit = MEMORY + size
        assert self.memory <= limit, f"took {self.memory / 2**20:.0f} MiB, expected at most {limit / 2**20:.0f}"


def open_bounded(reader: Callable[..., Any], *args: Any) -> Outcome:
    """Call ``reader(*args)`` in a forked child. The child's processor time is limited to four times the bound."""
    # The server has imported what is needed and has no threads: a child of this process, whose earlier tests may have
    # left threads of libraries behind, could wait for ever for what one of those held.
    receive, send = multiprocessing.Pipe(duplex=False)
    child = fork_preloaded(_run, (send, reader, args))
    send.close()
    hung = not receive.poll(_HANG)
    if hung:
        child.kill()
    found: dict[str, Any] | None = None
    with contextlib.suppress(EOFError):
        found = None if hung else receive.recv()
    receive.close()
    child.join()
    code = child.exitcode
    child.close()
    if found is None:
        return Outcome(None, "", _HANG if hung else 0.0, 0, None if hung or code is None else -code, hung)
    return Outcome(**found, signal=None, hung=False)


def _run(send: Connection, reader: Callable[..., Any], args: tuple[Any, ...]) -> None:
    code = 1
    try:
        seconds = int(4 * SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        _reset_peak()
        before, began = _resident("VmRSS"), time.process_time()
        found: dict[str, Any] = {"error": None, "message": "", "trace": ""}
        try:
            reader(*args)
        except BaseException as error:
            found["kinds"] = tuple(f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)
            found["error"] = found["kinds"][0]
            found["message"] = str(error)[:2000]
            found["trace"] = traceback.format_exc(limit=-12)[-8000:]
        found["seconds"] = time.process_time() - began
        found["memory"] = max(0, _resident("VmHWM") - before)
        send.send(found)
        code = 0
    finally:
        os._exit(code)


def _reset_peak() -> None:
    """Sets the highest resident set back to the present one: a forked child inherits its parent's."""
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _resident(field: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    raise LookupError(field)
