"""Atomic file writes that survive a power cut."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_pipe.engine.common.durable_files import fsync_parents, fsync_path


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Write a file through a temporary file in the same folder, which replaces *path* if the block succeeds.

    A missing folder is created. The temporary file keeps the suffix, from which some writers choose the format.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.parent / f".{secrets.token_hex(16)}.part{target.suffix}"
    try:
        yield unfinished
        if target.is_file():
            unfinished.chmod(target.stat().st_mode & 0o777)
        fsync_path(unfinished)
        os.replace(unfinished, target)
        fsync_parents(target)
    finally:
        unfinished.unlink(missing_ok=True)
