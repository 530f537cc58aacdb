"""Atomic replacement of a folder.

The new folder is written next to its final path, under a name that begins with a dot and accessible to the user alone,
and then renamed in one step. If the process is killed or the machine fails at any time, the final path holds either the
complete old folder or the complete new one. Call these functions in one process.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from contextlib import suppress
from pathlib import Path

from lightning_pipe.engine.common.durable_files import fsync_parents, fsync_path, fsync_tree


def folder_to_write(folder: Path) -> Path:
    """Temporary path of a folder while it is written."""
    return _get_sibling_path(folder, "writing")


def begin_folder(folder: Path) -> int:
    """Create the temporary folder, accessible to the user alone."""
    written = folder_to_write(folder)
    restore_half_replaced_folder(folder)
    _remove(written)
    written.mkdir(parents=True)
    permissions = written.stat().st_mode
    written.chmod(0o700)
    return permissions


def restore_half_replaced_folder(folder: Path) -> None:
    """Restore the old folder if a process ended between the two renames that replace a folder without an exchange.

    Such a process ran on a file system without an atomic exchange of names.
    """
    with suppress(FileNotFoundError):  # another process has restored it first
        if not os.path.lexists(folder):
            _get_sibling_path(folder, "replaced").rename(folder)


def finish_folder(folder: Path, permissions: int) -> None:
    """Move the written folder to its final path, durable against power failures, and then remove the old folder."""
    written, replaced = folder_to_write(folder), _get_sibling_path(folder, "replaced")
    written.chmod(permissions)
    fsync_tree(written)
    in_two_steps = False
    if not os.path.lexists(folder):
        written.rename(folder)
    elif not _exchange_paths_atomically(written, folder):
        in_two_steps = True
        _remove(replaced)
        folder.rename(replaced)
        written.rename(folder)
    fsync_parents(folder)
    if in_two_steps:
        remove_folder(
            replaced
        )  # in one step, so that restore_half_replaced_folder never restores a partly removed folder
    else:
        _remove(written)


def discard_folder(folder: Path) -> None:
    """Remove the temporary folder of a failed write, which may have filled the disk."""
    _remove(folder_to_write(folder))


def remove_folder(folder: Path) -> None:
    """Remove a folder, link or file. For other processes the path disappears in one step."""
    if folder.is_dir() and not folder.is_symlink():
        removed = _get_sibling_path(folder, "removing")
        _remove(removed)
        folder.rename(removed)
        fsync_path(folder.parent)  # otherwise a power failure could leave the name with some files removed
        folder = removed
    _remove(folder)


def _get_sibling_path(folder: Path, kind: str) -> Path:
    # Lightning takes each name with "hpc_ckpt_" for a complete checkpoint of a job that Slurm has stopped.
    return folder.with_name(f".{folder.name.replace('hpc_ckpt_', 'hpc%5Fckpt_')}.{kind}")


def _exchange_paths_atomically(first: Path, second: Path) -> bool:
    """Exchange two paths in one step with Linux's ``renameat2``."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    current, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2 is not None and renameat2(current, os.fsencode(first), current, os.fsencode(second), exchange) == 0


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
