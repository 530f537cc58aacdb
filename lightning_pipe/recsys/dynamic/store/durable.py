"""Files that are there whole or not at all, whenever the process or the machine stops.

Each function has one step that decides, a rename; before it nothing has happened, after it all has. Data is on disk
before the step, and the step itself when the function returns.
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

__all__ = ["checksum", "discard", "link_files", "move", "open_regular", "read_json", "write_json"]

# What it becomes in memory is fifty times that, at worst. A store of 30,000 files fits.
_LARGEST_JSON = 2 << 20


def move(source: Path, target: Path) -> None:
    """*target*, in the same folder, is *source* from now on; a file that was there is gone, a folder must not be."""
    os.replace(source, target)
    sync(target.parent)


def write_json(path: Path, value: Any) -> None:
    """The file holds *value*, with a checksum, in place of what it held."""
    text = json.dumps(value, sort_keys=True, indent=1)
    new = path.with_name(path.name + ".new")
    write_file(new, f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode())
    move(new, path)


@contextmanager
def open_regular(path: Path, largest: int | None = None) -> Iterator[BinaryIO]:
    """Open a file to read.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is a link, a pipe, a device or a folder, or has more than *largest* bytes.
        OSError: it cannot be read.
    """
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
    """What :func:`write_json` wrote.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not what was written.
    """
    with open_regular(path, _LARGEST_JSON) as file:
        content = file.read()
    text, _, checksum = content.removesuffix(b"\n").rpartition(b"\n")
    if f"{zlib.crc32(text):08x}".encode() != checksum or not content.endswith(b"\n"):
        raise ValueError(f"{path.name} does not fit its checksum")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deep") from error


def checksum(file: BinaryIO) -> int:
    """CRC-32 of a file from its beginning, read some at a time."""
    found = file.seek(0)
    while block := file.read(1 << 20):
        found = zlib.crc32(block, found)
    return found


def discard(path: Path) -> None:
    """The file or folder is gone, at once; nothing happens where it was not there."""
    try:
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
            return
        # A folder that was removed in part must not be taken for what it was. Without a sync: after a power cut it may
        # be, and by then nobody needs it.
        trash = path.with_name(f"trash.{path.name}")
        shutil.rmtree(trash, ignore_errors=True)
        os.replace(path, trash)
    except FileNotFoundError:
        return
    shutil.rmtree(trash)


def link_files(source: Path, target: Path, names: Iterable[str], shared: str) -> None:
    """A new folder with files of *source*: those whose names end in *shared*, which nobody changes, take no space.

    Where the file system has no hard links, they are copied.
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
