"""Files of rows and of stores that were made to harm: one error of ours, soon and in little memory, and never a signal.

Whoever makes such a file can make its checksums right, so each is written with them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.store.row_files import Columns, StoredRows, check_rows, read_rows, write_rows
from lightning_pipe.recsys.dynamic.store.row_store import RunPart
from lightning_pipe.recsys.dynamic.store.versions import VersionedFolder
from tests.scenarios.fuzzing.bounded import Outcome, open_bounded

COLUMNS: Columns = [((3,), torch.float32), ((), torch.float32)]
FILE, LIST = "users.rank-0-of-1.00000.pt", "users.rank-0-of-1.json"


def write_table(folder: Path) -> None:
    ids = torch.arange(5)
    rows = StoredRows(ids, ids + 1, ids + 2, [torch.rand(5, 3), torch.rand(5)])
    write_rows(folder, "users", 0, 1, iter([rows]))


def read_table(folder: Path) -> None:
    """As a resume does, and as a user without a model does."""
    for _ in read_rows(folder, "users"):
        pass
    check_rows(folder, {"users": COLUMNS})


def put(folder: Path, content: bytes) -> None:
    """Another content of the file, listed as it is."""
    (folder / FILE).write_bytes(content)
    listed = {"name": FILE, "rows": 5, "bytes": len(content), "crc32": zlib.crc32(content)}
    (folder / LIST).write_text(json.dumps([listed]))


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def tensors(**changes: Any) -> bytes:
    ids = torch.arange(5)
    good = {"ids": ids, "counts": ids, "last_seen": ids, "columns": [torch.zeros(5, 3), torch.zeros(5)]}
    return saved({**good, **changes})


def zipped(content: bytes) -> bytes:
    """A file of ``torch.save`` with another pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", content)
    return buffer.getvalue()


class _Called:
    """Whose unpickling calls anything."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = (function, args)

    def __reduce__(self) -> Any:
        return self._call


ROW_FILES: dict[str, Callable[[], bytes]] = {
    "ids of another type": lambda: tensors(ids=torch.arange(5).int()),
    "a wider column": lambda: tensors(columns=[torch.zeros(5, 4), torch.zeros(5)]),
    "another kind": lambda: saved([torch.zeros(5)]),
    "a call": lambda: zipped(pickle.dumps(_Called(os.system, "exit 3"), 2)),
}


@pytest.mark.parametrize("kind", ROW_FILES)
def test_a_file_of_rows_made_to_harm_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    write_table(tmp_path)
    content = ROW_FILES[kind]()
    put(tmp_path, content)
    _refused(open_bounded(read_table, tmp_path), len(content), FILE)


def _refused(outcome: Outcome, size: int, *told: str) -> None:
    outcome.check(SetupError, size=size)
    assert outcome.error is not None, "it was accepted"
    for text in told:
        assert text in outcome.message
    assert len(outcome.message) < 2000


def test_the_file_that_all_others_are_made_of_is_read(tmp_path: Path) -> None:
    write_table(tmp_path)
    put(tmp_path, tensors())
    outcome = open_bounded(read_table, tmp_path)
    outcome.check()
    assert outcome.error is None


ENTRY = {"name": FILE, "rows": 5, "bytes": 1, "crc32": 1}
ROW_LISTS: dict[str, bytes] = {
    "another folder": json.dumps([{**ENTRY, "name": "../secret.pt"}]).encode(),
    "a text for a number": json.dumps([{**ENTRY, "rows": "5"}]).encode(),
    "nested deep": b"[" * 10**6,
}


@pytest.mark.parametrize("kind", ROW_LISTS)
def test_a_list_of_files_made_to_harm_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    write_table(tmp_path)
    (tmp_path / LIST).write_bytes(ROW_LISTS[kind])
    _refused(open_bounded(read_table, tmp_path), len(ROW_LISTS[kind]), "users.rank-0-of-1")


def linked(path: Path) -> None:
    outside = path.parent.parent / "outside"
    shutil.copy(path, outside)
    path.unlink()
    path.symlink_to(outside)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


PLACES = {"a link": linked, "a device": device, "a pipe": pipe}


@pytest.mark.parametrize(("place", "name"), [("a link", FILE), ("a pipe", LIST)])
def test_what_is_no_file_is_not_read_for_rows(place: str, name: str, tmp_path: Path) -> None:
    write_table(tmp_path / "rows")
    PLACES[place](tmp_path / "rows" / name)
    _refused(open_bounded(read_table, tmp_path / "rows"), 0, name)


# ---------------------------------------------------------------------- stores


def write_store(path: Path) -> None:
    store = VersionedFolder(path, "files", {"width": 8}, shared=".sst")
    store.join(RunPart("abc", 0, 1))
    store.settle(0)

    def fill(new: Path) -> None:
        new.mkdir()
        (new / "rows.sst").write_bytes(bytes(1000))
        (new / "names").write_bytes(b"names")

    store.prepare(1, {"step": "7"}, fill)
    store.commit(1)
    store.close()


def open_store(path: Path) -> None:
    store = VersionedFolder(path, "files", {"width": 8}, shared=".sst")
    store.settle(store.state.committed)
    store.close()


def put_json(path: Path, text: bytes) -> None:
    path.write_bytes(text + b"\n%08x\n" % zlib.crc32(text))


JSON: dict[str, tuple[str, bytes]] = {
    "nothing": ("store.json", b""),
    "nested deep": ("committed.json", b"[" * 10**6 + b"]" * 10**6),
    "a version below 0": ("committed.json", b'{"version": -1}'),
    "files elsewhere": (
        "version.1/contents.json",
        b'{"version": 1, "notes": {}, "files": {"../../../secret": [1, 2]}}',
    ),
    "a note that is no text": ("version.1/contents.json", b'{"version": 1, "notes": {"step": 5}, "files": {}}'),
    "a part that is none": (
        "store.json",
        b'{"format": 1, "engine": "files", "description": {"width": 8}, "part": [1]}',
    ),
}


@pytest.mark.parametrize("kind", JSON)
def test_a_file_of_a_store_made_to_harm_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    name, content = JSON[kind]
    write_store(tmp_path)
    put_json(tmp_path / name, content)
    _refused(open_bounded(open_store, tmp_path), len(content), str(tmp_path))


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("a link", "store.json"),
        ("a pipe", "committed.json"),
        ("a device", "version.1/names"),
    ],
)
def test_what_is_no_file_is_not_read_for_a_store(place: str, name: str, tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    PLACES[place](tmp_path / "store" / name)
    _refused(open_bounded(open_store, tmp_path / "store"), 0, str(tmp_path))


def test_what_a_version_does_not_list_is_not_copied(tmp_path: Path) -> None:
    write_store(tmp_path / "store")
    (tmp_path / "store" / "version.1" / "more").symlink_to("/dev/zero")
    open_bounded(open_store, tmp_path / "store").check()
    assert {one.name for one in (tmp_path / "store" / "working").iterdir()} == {"rows.sst", "names"}
