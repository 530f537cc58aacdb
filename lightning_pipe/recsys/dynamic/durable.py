"""Files that are there whole or not at all, whenever the process or the machine stops.

Each function has one step that decides, a rename; before it nothing has happened, after it all has. Data is on disk
before the step, and the step itself when the function returns.
"""

from __future__ import annotations

import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

__all__ = ["discard", "link_files", "move", "read_json", "sync", "write_json"]


def sync(path: Path) -> None:
    """A file's bytes, or a folder's names, are on disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def move(source: Path, target: Path) -> None:
    """*target*, in the same folder, is *source* from now on; a file that was there is gone, a folder must not be."""
    os.replace(source, target)
    sync(target.parent)


def write_json(path: Path, value: Any) -> None:
    """The file holds *value*, with a checksum, in place of what it held."""
    text = json.dumps(value, sort_keys=True, indent=1)
    new = path.with_name(path.name + ".new")
    with new.open("w") as file:
        file.write(f"{text}\n{zlib.crc32(text.encode()):08x}\n")
        file.flush()
        os.fsync(file.fileno())
    move(new, path)


def read_json(path: Path) -> Any:
    """What :func:`write_json` wrote.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not what was written.
    """
    content = path.read_bytes()
    text, _, checksum = content.removesuffix(b"\n").rpartition(b"\n")
    if f"{zlib.crc32(text):08x}".encode() != checksum or not content.endswith(b"\n"):
        raise ValueError(f"{path.name} does not fit its checksum")
    return json.loads(text)


def discard(path: Path) -> None:
    """The file or folder is gone, at once; nothing happens where it was not there."""
    try:
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
            return
        # A folder that was removed in part must not be taken for what it was.
        trash = path.with_name(f"trash.{path.name}")
        shutil.rmtree(trash, ignore_errors=True)
        move(path, trash)
    except FileNotFoundError:
        return
    shutil.rmtree(trash)


def link_files(source: Path, target: Path, shared: str) -> None:
    """A new folder with the files of *source*: those whose names end in *shared*, which nobody changes, take no space.

    Where the file system has no hard links, they are copied.
    """
    target.mkdir()
    for file in source.iterdir():
        if file.name.endswith(shared):
            try:
                os.link(file, target / file.name)
                continue
            except OSError:
                pass
        shutil.copyfile(file, target / file.name)
