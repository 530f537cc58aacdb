"""Files of rows and of stores that were made to harm: one error of ours, soon and in little memory, and never a signal.

Whoever makes such a file can make its checksums right, so each is written with them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.store.row_files import Columns, StoredRows, check_row_files, read_rows, write_rows
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
    check_row_files(folder, {"users": COLUMNS})


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
    "nothing": bytes,
    "text": lambda: b"rows" * 1000,
    "ids of another type": lambda: tensors(ids=torch.arange(5).int()),
    "ids of another length": lambda: tensors(ids=torch.arange(6)),
    "counts that are a list": lambda: tensors(counts=[1, 2, 3, 4, 5]),
    "last_seen without rows": lambda: tensors(last_seen=torch.tensor(5)),
    "a column too few": lambda: tensors(columns=[torch.zeros(5, 3)]),
    "no columns": lambda: tensors(columns=[]),
    "a column of another type": lambda: tensors(columns=[torch.zeros(5, 3).double(), torch.zeros(5)]),
    "a wider column": lambda: tensors(columns=[torch.zeros(5, 4), torch.zeros(5)]),
    "a shorter column": lambda: tensors(columns=[torch.zeros(4, 3), torch.zeros(5)]),
    "a tensor of one number for all": lambda: tensors(ids=torch.zeros(1, dtype=torch.int64).expand(10**12)),
    "a tensor without values": lambda: tensors(ids=torch.empty(10**12, dtype=torch.int64, device="meta")),
    "a sparse tensor": lambda: tensors(ids=torch.zeros(5, 5).to_sparse()),
    "a quantized tensor": lambda: tensors(ids=torch.quantize_per_tensor(torch.zeros(5), 0.1, 0, torch.qint8)),
    "something more": lambda: tensors(more=torch.zeros(5)),
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
    "nothing": b"",
    "text": b"[rows]",
    "another folder": json.dumps([{**ENTRY, "name": "../secret.pt"}]).encode(),
    "an absolute path": json.dumps([{**ENTRY, "name": "/dev/zero"}]).encode(),
    "a missing field": json.dumps([{"name": FILE}]).encode(),
    "a further field": json.dumps([{**ENTRY, "more": 1}]).encode(),
    "a text for a number": json.dumps([{**ENTRY, "rows": "5"}]).encode(),
    "a number of too many digits": b'[{"name": "' + FILE.encode() + b'", "rows": ' + b"9" * 10**6 + b"}]",
    "the same file twice": json.dumps([ENTRY, ENTRY]).encode(),
    "nested deep": b"[" * 10**6,
    "bytes that are no text": b"\xff\xfe" * 100,
}


@pytest.mark.parametrize("kind", ROW_LISTS)
def test_a_list_of_files_made_to_harm_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    write_table(tmp_path)
    (tmp_path / LIST).write_bytes(ROW_LISTS[kind])
    _refused(open_bounded(read_table, tmp_path), len(ROW_LISTS[kind]), "users.rank-0-of-1")


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def sparse(path: Path) -> None:
    os.truncate(path, 1 << 40)


PLACES = {"a device": device, "a pipe": pipe, "a folder": folder, "a terabyte": sparse}


@pytest.mark.parametrize("name", [FILE, LIST])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_file_is_not_read_for_rows(place: str, name: str, tmp_path: Path) -> None:
    write_table(tmp_path / "rows")
    PLACES[place](tmp_path / "rows" / name)
    _refused(open_bounded(read_table, tmp_path / "rows"), 0, name)


# ---------------------------------------------------------------------- stores

STORE: dict[str, bytes] = {
    "nothing": b"",
    "a version of too many digits": b'{"committed": ' + b"9" * 5000 + b"}",
    "nested deep": b"[" * 10**6 + b"]" * 10**6,
    "bytes that are no text": b"\xff\xfe\xfd",
    "a part that is none": b'{"format": 1, "description": {"width": 8}, "part": [1], "committed": 0}',
    "a version that is none": b'{"format": 1, "description": {"width": 8}, "part": null, "committed": 7}',
}


def open_store(path: Path) -> None:
    VersionedFolder(path, {"width": 8}).close()


@pytest.mark.parametrize("kind", STORE)
def test_a_file_of_a_store_made_to_harm_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    open_store(tmp_path)
    (tmp_path / "store.json").write_bytes(STORE[kind] + b"\n%08x\n" % zlib.crc32(STORE[kind]))
    _refused(open_bounded(open_store, tmp_path), len(STORE[kind]), f"{tmp_path} is damaged")
