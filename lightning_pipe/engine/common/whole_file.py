"""Atomic file writes that survive a power cut."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_pipe.engine.common.durable_files import sync_name


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Write a file through a temporary file in the same folder, which replaces *path* if the block succeeds.

    A missing folder is created. The temporary file keeps the suffix, from which some writers choose the format.
    """
    target = Path(path)
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{secrets.token_hex(16)}.part{target.suffix}"
    # 0o666 minus the umask, as for open().
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        mode = _mode_of(target)
        if mode is not None:
            os.fchmod(descriptor, mode | stat.S_IWUSR)  # the writer opens the file again
        yield unfinished
        written = os.fstat(descriptor)
        if not os.path.samestat(written, os.lstat(unfinished)):
            raise OSError(f"{unfinished} was replaced while {str(target)!r} was written; the target is unchanged")
        if not written.st_size:
            raise OSError(f"nothing was written to {str(target)!r}")
        if mode is not None:
            os.fchmod(descriptor, mode)
        os.fsync(descriptor)
        os.replace(unfinished, target)
        sync_name(target)
    finally:
        os.close(descriptor)
        unfinished.unlink(missing_ok=True)


def _mode_of(path: Path) -> int | None:
    """Permissions of the regular file at *path*; None if *path* is not a regular file."""
    try:
        found = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    return stat.S_IMODE(found) & 0o777 if stat.S_ISREG(found) else None
