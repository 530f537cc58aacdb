"""Locks of folders, each held by one process until it lets go or ends.

They are of the kind that belongs to the open file (``flock``): POSIX record locks vanish when the process closes any
descriptor of the file, such as that of a copy of the folder. A forked child shares the open file and would hold the
lock after its parent was killed, so it closes its descriptor at once; one that executes another program does not
inherit it. On NFS, Linux turns these locks into the server's.

Tested in ``tests/scenarios/recommenders/test_store_damage.py``.
"""

from __future__ import annotations

import fcntl
import os
from io import FileIO
from pathlib import Path

__all__ = ["FolderLock"]

_held: dict[Path, FileIO] = {}


class FolderLock:
    """A lock that is held until it is closed.

    Args:
        folder: one that is there; the file ``lock`` in it is made.

    Raises:
        BlockingIOError: it is held already; says by which process, this or another.
        OSError: the file cannot be opened or locked.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = FileIO(os.open(self._folder / "lock", flags, 0o644), "r+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise BlockingIOError("this" if self._folder in _held else "another") from error
            raise
        _held[self._folder] = self._file

    def close(self) -> None:
        """Let go; a second call, and one in a forked child, does nothing."""
        if not self._file.closed:
            del _held[self._folder]
            self._file.close()


def _let_go_in_child() -> None:
    for file in _held.values():
        file.close()  # not unlocked: the parent has the same open file
    _held.clear()


os.register_at_fork(after_in_child=_let_go_in_child)
