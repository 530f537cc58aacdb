"""Readers of the small files in a store's folder, which may be damaged or hostile. The type of every value is checked.

Checksums detect damage, but not files that someone else has written. A file that does not exist is a FileNotFoundError,
one with other contents, or that is not regular, a ValueError.
"""

from __future__ import annotations

import os
import reprlib
from pathlib import Path
from typing import Any

from lightning_pipe.recsys.dynamic.store.durable import checksum, open_regular, read_json
from lightning_pipe.recsys.dynamic.store.row_store import RunPart


def read_header(folder: Path) -> dict[str, Any]:
    """Read the header of the store from ``store.json``."""
    found = read_json(folder / "store.json")
    if type(found) is not dict or found.keys() - {"format", "engine", "description", "part"}:
        raise ValueError(f"store.json holds {short(found)}, expected format, engine, description and part")
    part_of(found)
    return found


def part_of(header: dict[str, Any]) -> RunPart | None:
    """Part of a run that the store's header names; None if the store has not joined a run."""
    part = header.get("part")
    kinds = {"run": str, "rank": int, "ranks": int}
    if part is not None and (type(part) is not dict or {name: type(one) for name, one in part.items()} != kinds):
        raise ValueError(f"part in store.json is {short(part)}, expected run (a text), rank and ranks (numbers)")
    return None if part is None else RunPart(**part)


def read_committed(folder: Path) -> int:
    """Read the committed version from ``committed.json``."""
    found = read_json(folder / "committed.json")
    version = found["version"] if type(found) is dict and found.keys() == {"version"} else None
    if type(version) is not int or not 0 <= version < 1 << 63:
        raise ValueError(f"committed.json holds {short(found)}, expected only version, a whole number >= 0")
    return version


def read_contents(folder: Path, version: int) -> dict[str, Any]:
    """Read the notes and the list of files of a version from its ``contents.json``."""
    found = read_json(folder / "contents.json")
    where = f"contents.json of version {version}"
    if type(found) is not dict or found.keys() != {"version", "notes", "files"}:
        raise ValueError(f"{where} holds {short(found)}, expected version, notes and files")
    if found["version"] != version:
        raise ValueError(f"{where} belongs to version {short(found['version'])}")
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
    """Size and checksum of a file; only the size if its name ends in *shared*, because its blocks have checksums."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        alone = path.name.endswith(shared) or (expected is not None and expected[0] != size)
        return [size] if alone else [size, checksum(file)]


def short(value: Any) -> str:
    """Beginning of a value's text, with bounded cost for values of any size and depth."""
    return reprlib.repr(value)
