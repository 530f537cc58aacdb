"""The small files of a store's folder, read as what may be damaged or made to harm: each is of the kinds that it holds.

Checksums find damage. They say nothing of what somebody else has written.

Tested in ``tests/scenarios/fuzzing/test_store_files.py``.
"""

from __future__ import annotations

import os
import reprlib
from pathlib import Path
from typing import Any

from lightning_pipe.recsys.dynamic.store.durable import checksum, open_regular, read_json
from lightning_pipe.recsys.dynamic.store.row_store import RunPart

__all__ = ["fingerprint", "part_of", "read_committed", "read_contents", "read_header", "short"]


def read_header(folder: Path) -> dict[str, Any]:
    """What the store is, of ``store.json``.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it holds something else.
    """
    found = read_json(folder / "store.json")
    if type(found) is not dict or found.keys() - {"format", "engine", "description", "part"}:
        raise ValueError(f"store.json holds {short(found)}, expected format, engine, description and part")
    part_of(found)
    return found


def part_of(header: dict[str, Any]) -> RunPart | None:
    """Whose part of which run the store is.

    Raises:
        ValueError: it is none.
    """
    part = header.get("part")
    kinds = {"run": str, "rank": int, "ranks": int}
    if part is not None and (type(part) is not dict or {name: type(one) for name, one in part.items()} != kinds):
        raise ValueError(f"part in store.json is {short(part)}, expected run (a text), rank and ranks (numbers)")
    return None if part is None else RunPart(**part)


def read_committed(folder: Path) -> int:
    """The version that is the present one, of ``committed.json``.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it holds something else.
    """
    found = read_json(folder / "committed.json")
    version = found["version"] if type(found) is dict and found.keys() == {"version"} else None
    if type(version) is not int or not 0 <= version < 1 << 63:
        raise ValueError(f"committed.json holds {short(found)}, expected version alone, a number from 0")
    return version


def read_contents(folder: Path, version: int) -> dict[str, Any]:
    """Notes and files of a version, of its ``contents.json``.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it holds something else, or another version.
    """
    found = read_json(folder / "contents.json")
    where = f"contents.json of version {version}"
    if type(found) is not dict or found.keys() != {"version", "notes", "files"}:
        raise ValueError(f"{where} holds {short(found)}, expected version, notes and files")
    if found["version"] != version:
        raise ValueError(f"{where} is of version {short(found['version'])}")
    if type(found["notes"]) is not dict or any(type(text) is not str for text in found["notes"].values()):
        raise ValueError(f"{where} has the notes {short(found['notes'])}, expected texts by name")
    files = found["files"]
    if type(files) is not dict or not all(map(_is_file, files, files.values())):
        raise ValueError(f"{where} has the files {short(files)}, expected size and checksum by name")
    return found


def _is_file(name: str, expected: Any) -> bool:
    numbers = type(expected) is list and len(expected) in (1, 2) and all(type(one) is int for one in expected)
    return numbers and name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def fingerprint(path: Path, shared: str, expected: list[int] | None = None) -> list[int]:
    """Size and checksum of a file; of those whose names end in *shared* the size alone: their blocks have checksums.

    A file that is not of the size expected is not read.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no regular file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        alone = path.name.endswith(shared) or (expected is not None and expected[0] != size)
        return [size] if alone else [size, checksum(file)]


def short(value: Any) -> str:
    """The beginning of a value's text, whatever its size and depth."""
    return reprlib.repr(value)
