"""Locks of folders, each held by one process until it releases the lock or ends.

The locks belong to the open file (``flock``). POSIX record locks are unsuitable: they vanish when the process closes
any descriptor of the file, for example while it copies the folder. A forked child shares the open file and would hold
the lock after its parent was killed, so it closes its descriptor immediately. A child that executes another program
does not inherit the descriptor. On NFS, Linux turns these locks into locks of the server.
"""

from __future__ import annotations

import fcntl
import os
from io import FileIO
from pathlib import Path

_lock_files: dict[Path, FileIO] = {}


class FolderLock:
    """Lock of a folder, held until it is closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        self._file = FileIO(os.open(self._folder / "lock", flags, 0o644), "r+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            self._file.close()
            if isinstance(error, BlockingIOError):
                raise BlockingIOError("this" if self._folder in _lock_files else "another") from error
            raise
        _lock_files[self._folder] = self._file

    def close(self) -> None:
        """Release the lock. A second call, and a call in a forked child, has no effect."""
        if not self._file.closed:
            del _lock_files[self._folder]
            self._file.close()


def _release_in_child() -> None:
    for file in _lock_files.values():
        file.close()  # without unlocking, which would release the parent's lock on the shared open file
    _lock_files.clear()


os.register_at_fork(after_in_child=_release_in_child)
