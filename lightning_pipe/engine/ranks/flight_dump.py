"""Dump of what a rank does in a run that hangs: batch, tasks, stack, and the collectives of PyTorch's flight recorder.

Ranks do not communicate, because communication hangs. A thread of each rank looks for a file that is touched::

    rank that times out    write flight_rank_0.json, touch flight_request, raise
    rank that is stuck     thread sees flight_request, writes flight_rank_1.json

It also works while the main thread waits in native code, where Python runs no signal handlers.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_pipe._compat.flight_recorder import process_groups, recorded, turn_on
from lightning_pipe.engine.common.errors import text_of
from lightning_pipe.engine.common.whole_file import whole_file

FORMAT = "lightning_pipe flight dump 1"
PATTERN = "flight_rank_*.json"
# Seconds between two looks at the request, and limit of the wait for other ranks' dumps after a timeout.
_LOOK, _PATIENCE = 0.5, 3.0

# Latest task of each thread group, its iteration, and True once it has ended without an error. The group "stages" has
# the schedule's actions. Shared by all pipelines of the process: a dump shows what its threads do.
places: dict[str, tuple[str, int | None, bool]] = {}


class FlightDump:
    """Writes the dump of this rank when it is requested. To be made before the process groups.

    Args:
        folder: folder of all ranks' dumps.
        rank: rank of this process.
        world_size: number of ranks.
        batch: function that returns a text which identifies the current batch.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, batch: Callable[[], str]) -> None:
        places.clear()
        self._rank, self._world_size, self._batch = rank, world_size, batch
        self._began, self._main = time.time(), threading.get_ident()
        self._dumped: object = None  # the places in the last dump
        self._paths = [folder / PATTERN.replace("*", str(other)) for other in range(world_size)]
        self._request = folder / "flight_request"
        self._nccl_dump = Path(f"{turn_on(str(folder / 'flight_nccl_rank_'))}{rank}")
        self._ended = threading.Event()
        seen = self._changes()
        self._thread = threading.Thread(target=self._watch, args=(seen,), name="lightning_pipe-flight", daemon=True)
        self._thread.start()

    def note(self, error: BaseException) -> None:
        """Write the dump for the error of a collective, and name the file in a note of the error. Never raises."""
        self.stop()
        path = self._paths[self._rank]
        try:
            # An earlier dump at the same places is better, because a signal may have started other collectives since.
            if self._dumped != places:
                self.write(error)
            error.add_note(f"This rank's state is in {path}. Run: lightning-pipe diagnose {path.parent}")
            self._request.touch()
            # Other ranks are still there, until the launcher ends them.
            deadline = time.monotonic() + _PATIENCE * ("timed out" in text_of(error).lower())
            while time.monotonic() < deadline and min(map(_changed, self._paths)) < self._began:
                time.sleep(_LOOK / 10)
        except Exception as failed:
            error.add_note(f"This rank's state could not be written to {path}: {text_of(failed)}")

    def stop(self) -> None:
        """End the thread. Can be called repeatedly."""
        self._ended.set()
        self._thread.join()

    def write(self, error: BaseException | None = None) -> None:
        """Write the dump, with the error that ends the run if there is one."""
        self._dumped = dict(places)
        collectives, completed = recorded()
        if error is None:
            stack = traceback.extract_stack(sys._current_frames()[self._main])
        else:
            stack = traceback.extract_tb(error.__traceback__)
        content: dict[str, Any] = {
            "format": FORMAT,
            "rank": self._rank,
            "world_size": self._world_size,
            "host": socket.gethostname(),
            "began": self._began,
            "written": time.time(),
            "error": None if error is None else f"{type(error).__name__}: {text_of(error)}",
            "batch": self._batch(),
            "tasks": [_text(group, *place) for group, place in list(places.items())],
            "stack": [f"{one.filename}:{one.lineno} {one.name}" for one in reversed(stack)],  # innermost first
            "groups": process_groups(),
            "completed": completed,
            "collectives": collectives,
        }
        with whole_file(self._paths[self._rank]) as unfinished:
            unfinished.write_text(json.dumps(content), encoding="utf-8")

    def _changes(self) -> tuple[float, float]:
        return _changed(self._request), _changed(self._nccl_dump)

    def _watch(self, seen: tuple[float, float]) -> None:
        while not self._ended.wait(_LOOK):
            before, seen = seen, self._changes()
            with suppress(Exception):  # for example a full disk, which must not end training
                if before != seen:
                    self.write()
                if before[1] != seen[1]:  # NCCL ends the process after its dump
                    self._request.touch()


def _text(group: str, task: str, iteration: int | None, ended: bool) -> str:
    of = "" if iteration is None else f" of iteration {iteration}"
    return f"{'after' if ended else 'in'} {task}{of}" + ("" if group in ("main", "stages") else f" ({group})")


def _changed(path: Path) -> float:
    """Time at which a file was written, in seconds; 0 without the file."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
