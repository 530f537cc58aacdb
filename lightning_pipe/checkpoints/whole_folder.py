"""A folder that is in its place when it is whole, and not before.

It is written beside its place, under a name that begins with a dot, by nobody but the user who runs this, and put there
in one step. Whenever the process ends, by a signal or with the machine, the place holds all of the old or all of the
new. One process does all this.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from contextlib import suppress
from pathlib import Path

from lightning_pipe.engine.common.durable_files import sync, sync_all, sync_name

__all__ = ["begin_folder", "discard_folder", "finish_folder", "folder_to_write", "put_back", "remove_folder"]


def folder_to_write(folder: Path) -> Path:
    """Where a folder is while it is being written."""
    return _beside(folder, "writing")


def begin_folder(folder: Path) -> int:
    """Make the folder to write to, private to the user.

    Returns:
        The permissions that it is to have when it is in its place.
    """
    beside = folder_to_write(folder)
    put_back(folder)
    _remove(beside)
    beside.mkdir(parents=True)
    permissions = beside.stat().st_mode
    beside.chmod(0o700)
    return permissions


def put_back(folder: Path) -> None:
    """Put the old folder back where the process ended between the two steps of a file system without an exchange."""
    with suppress(FileNotFoundError):  # another process has just done it
        if not os.path.lexists(folder):
            _beside(folder, "replaced").rename(folder)


def finish_folder(folder: Path, permissions: int) -> None:
    """Put what was written in its place, where it stays when the power fails. What was there is removed after that."""
    beside, replaced = folder_to_write(folder), _beside(folder, "replaced")
    beside.chmod(permissions)
    sync_all(beside)
    in_two_steps = False
    if not os.path.lexists(folder):
        beside.rename(folder)
    elif not _exchange(beside, folder):
        in_two_steps = True
        _remove(replaced)
        folder.rename(replaced)
        beside.rename(folder)
    sync_name(folder)
    if in_two_steps:
        remove_folder(replaced)  # at once: what is left of one that was removed in part must not be put back
    else:
        _remove(beside)


def discard_folder(folder: Path) -> None:
    """Remove what was written of a folder that will not be whole: a disk may be full of it."""
    _remove(folder_to_write(folder))


def remove_folder(folder: Path) -> None:
    """Remove a folder, or a link or file in its place, in one step for whoever looks at its name."""
    if folder.is_dir() and not folder.is_symlink():
        beside = _beside(folder, "removing")
        _remove(beside)
        folder.rename(beside)
        sync(folder.parent)  # or its files could go before it
        folder = beside
    _remove(folder)


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


def _exchange(one: Path, other: Path) -> bool:
    """Let two names change places in one step; False where system or file system cannot (Linux's ``renameat2``)."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    current, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2 is not None and renameat2(current, os.fsencode(one), current, os.fsencode(other), exchange) == 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
