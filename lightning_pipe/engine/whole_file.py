"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Give a path to write to beside *path*, and put what was written in its place; or leave it as it was.

    The folder is made if it is not there. The file beside it keeps the suffix, which tells some writers the format.

    Args:
        path: of the file.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.stem}.part{target.suffix}")
    try:
        yield unfinished
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
