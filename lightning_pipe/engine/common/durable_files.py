"""Files and folders that are still there after a power cut.

A file system keeps what was synced. The bytes of a file and the name that leads to them are synced apart: the second
with the folder that has the name.

Tested in ``tests/scenarios/checkpoints/test_power_cut.py``.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["sync", "sync_all", "sync_name", "write_file"]


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Wait until a folder is on disk with everything below it, but for its own name. Links are not followed."""
    for inner, _, files in os.walk(folder):
        for name in files:
            file = Path(inner, name)
            if file.is_file() and not file.is_symlink():
                sync(file)
        sync(Path(inner))


def sync_name(path: Path) -> None:
    """Wait until the name of a file or folder is on disk, and those of the folders that lead to it.

    Any of these may be new, whoever has made it. Folders above the first are left out where the system does not let us.
    """
    parent = path.parent.resolve()
    sync(parent)
    for above in parent.parents:
        with suppress(OSError):
            sync(above)


def write_file(path: Path, content: bytes) -> None:
    """Write a file whose bytes are on disk when this returns; its name is not, yet."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
