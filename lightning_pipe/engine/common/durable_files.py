"""Files and folders that survive a power cut.

A file system only guarantees synced data. The bytes of a file and its name are synced separately: the name is part of
the folder.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Wait until the bytes of a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Wait until everything below a folder is on disk. The folder's own name is not synced; links are not followed."""
    for inner, _, files in os.walk(folder):
        for name in files:
            file = Path(inner, name)
            if file.is_file() and not file.is_symlink():
                fsync_path(file)
        fsync_path(Path(inner))


def fsync_parents(path: Path) -> None:
    """Wait until the name of a file, and of its parent folders, which may all be new, are on disk."""
    parent = path.parent.resolve()
    fsync_path(parent)
    for above in parent.parents:
        with suppress(OSError):
            fsync_path(above)


def write_and_fsync(path: Path, content: bytes) -> None:
    """Write a file and wait until its bytes are on disk. Its name is not synced; see :func:`fsync_parents`."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
