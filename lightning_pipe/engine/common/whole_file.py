"""Files that are written whole or not at all, and are still there after a power cut."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_pipe.engine.common.durable_files import sync_name

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Give a path to write to beside *path*, and put what was written in its place; or leave it as it was.

    The folder is made if it is not there. The file beside it keeps the suffix, which tells some writers the format. Its
    name cannot be guessed, and it is new: nobody who may write to the folder can have put a link there. A symbolic link
    at *path* is replaced; what it points to is left alone. The file has the permissions of the one that it replaces, or
    else those of any new file.

    Args:
        path: of the file.

    Raises:
        OSError: it cannot be written, or nothing was.
    """
    target = Path(path)
    folder = target.parent
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{secrets.token_hex(16)}.part{target.suffix}"
    # 0o666 less the umask, as open() has it.
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        mode = _mode_of(target)
        if mode is not None:
            os.fchmod(descriptor, mode | stat.S_IWUSR)  # the writer opens it once more
        yield unfinished
        written = os.fstat(descriptor)
        if not os.path.samestat(written, os.lstat(unfinished)):
            raise OSError(f"{unfinished} was replaced while {str(target)!r} was written; nothing is changed")
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
    """Permissions of the regular file at *path*; None where there is none."""
    try:
        found = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    return stat.S_IMODE(found) & 0o777 if stat.S_ISREG(found) else None
