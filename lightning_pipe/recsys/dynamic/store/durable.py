"""Atomic and durable file operations: after a crash of the process or machine, a file exists completely or not at all.

The effect of each function takes place in a single rename. The data are on disk before the rename, and the rename is on
disk when the function returns.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from lightning_pipe.engine.common.durable_files import sync, write_file

# Bytes; parsed JSON takes at most about fifty times as much memory. A store of 30,000 files fits.
_LARGEST_JSON = 2 << 20


def move(source: Path, target: Path) -> None:
    """Rename *source* to *target* in the same folder. Replaces an existing file; an existing folder is an error."""
    os.replace(source, target)
    sync(target.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace the file's contents by *value* and a checksum."""
    text = json.dumps(value, sort_keys=True, indent=1)
    new = path.with_name(path.name + ".new")
    write_file(new, f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode())
    move(new, path)


@contextmanager
def open_regular(path: Path, largest: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file for reading."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path.name} is a link, expected a file") from error
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise ValueError(f"{path.name} is a pipe, a device or a folder, expected a file")
    with open(descriptor, "rb") as file:
        size = found.st_size
        if largest is not None and size > largest:
            raise ValueError(f"{path.name} has {size} bytes, expected at most {largest}")
        yield file


def read_json(path: Path) -> Any:
    """Read a value written by :func:`write_json`."""
    with open_regular(path, _LARGEST_JSON) as file:
        content = file.read()
    text, _, checksum = content.removesuffix(b"\n").rpartition(b"\n")
    if f"{zlib.crc32(text):08x}".encode() != checksum or not content.endswith(b"\n"):
        raise ValueError(f"{path.name} does not match its checksum")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deeply") from error


def checksum(file: BinaryIO) -> int:
    """CRC-32 of a whole file, read in blocks."""
    found = file.seek(0)
    while block := file.read(1 << 20):
        found = zlib.crc32(block, found)
    return found


def discard(path: Path) -> None:
    """Remove a file or folder atomically, if it exists."""
    try:
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
            return
        # A partly removed folder must not be mistaken for a complete one. The rename needs no sync: a folder that
        # reappears after a power cut is no longer in use.
        trash = path.with_name(f"trash.{path.name}")
        shutil.rmtree(trash, ignore_errors=True)
        os.replace(path, trash)
    except FileNotFoundError:
        return
    shutil.rmtree(trash)


def link_files(source: Path, target: Path, names: Iterable[str], shared: str) -> None:
    """Create a folder with files of *source*, as hard links if their names end in *shared*, else as copies.

    Files that are linked must never be changed. If the file system has no hard links, they are copied.
    """
    target.mkdir()
    for name in names:
        if name.endswith(shared):
            try:
                os.link(source / name, target / name)
                continue
            except OSError:
                pass
        shutil.copyfile(source / name, target / name)
