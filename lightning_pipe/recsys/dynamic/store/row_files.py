"""Rows of dynamic tables as files: what a checkpoint and an export are made of.

    <table>.rank-0-of-2.00000.pt     ids, counts, the batches they were last seen in, and a tensor for each column
    <table>.rank-0-of-2.json         the rank's files: how many rows each has, its bytes and their checksum

Every rank writes its own; any number of ranks can read them. Ids are the user's own, not mixed.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import torch

from lightning_pipe._compat.torch import is_view
from lightning_pipe.engine.common.durable_files import sync_name, write_file
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.store.durable import checksum, open_regular
from lightning_pipe.recsys.dynamic.store.tensor_file import read_tensors

__all__ = ["Column", "Columns", "StoredRows", "check_rows", "read_rows", "write_rows"]

# Shape of a row in it, and type.
Column = tuple[tuple[int, ...], torch.dtype]
Columns = Sequence[Column]

# Bytes: a scan of a store gives some megabytes at a time, and once gave 65,536 rows.
_LARGEST_FILE = 1 << 32
_LARGEST_LIST = 1 << 26
_NUMBERS = re.compile(rb'(\d{1,18}), "bytes": (\d{1,18}), "crc32": (\d{1,10})\}(, |\])')


@dataclass(frozen=True)
class StoredRows:
    """Some rows of one table.

    Attributes:
        ids: int64 [n].
        counts: int64 [n], in how many batches each has been.
        last_seen: int64 [n], the number of the batch that each was last in.
        columns: weights [n, dimensions] and the optimiser's states, each [n] or [n, dimensions].
    """

    ids: torch.Tensor
    counts: torch.Tensor
    last_seen: torch.Tensor
    columns: list[torch.Tensor]


def write_rows(folder: Path, table: str, rank: int, ranks: int, chunks: Iterator[StoredRows]) -> int:
    """Write this rank's rows of a table, a file for each of *chunks*; returns how many rows there were.

    They are on disk when it returns.

    Raises:
        SetupError: the folder has rows of the table already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    there = [
        file.name for file in folder.glob(f"{escape(table)}.rank-*") if not _of(file, table, ranks) or _is(file, rank)
    ]
    if there:
        raise SetupError(
            f"rows of dynamic table {table} were to be written to {str(folder)!r}, which has some already, as"
            f" {sorted(there)[0]}; needed is a folder without: name another, or remove it"
        )
    files: list[dict[str, Any]] = []
    for number, rows in enumerate(chunks):
        contents = {
            "ids": rows.ids,
            "counts": rows.counts,
            "last_seen": rows.last_seen,
            # A view would bring all that it is a view of.
            "columns": [column.contiguous().clone() if is_view(column) else column for column in rows.columns],
        }
        buffer = io.BytesIO()
        torch.save(contents, buffer)
        packed = buffer.getvalue()
        name = f"{table}.rank-{rank}-of-{ranks}.{number:05}.pt"
        write_file(folder / name, packed)
        files.append({"name": name, "rows": len(rows.ids), "bytes": len(packed), "crc32": zlib.crc32(packed)})
    listed = folder / f"{table}.rank-{rank}-of-{ranks}.json"
    write_file(listed, json.dumps(files).encode())
    sync_name(listed)
    return sum(int(file["rows"]) for file in files)


def check_rows(folder: Path, tables: Mapping[str, Columns | None]) -> None:
    """Looks whether all ranks' rows of each table are there, and as they were written. Reads every file.

    Args:
        folder: where they are.
        tables: of each the shape of a row in each column, and the column's type; None where any will do.

    Raises:
        SetupError: a file is damaged or missing, holds something else, or they are not of one number of ranks.
    """
    for table, columns in tables.items():
        for _ in _all_rows(folder, table, columns):
            pass


def read_rows(folder: str | Path, table: str, module: str | None = None) -> Iterator[StoredRows]:
    """All ranks' rows of a table, as they were written, without a model or other ranks.

    Args:
        folder: of a checkpoint, or one that ``ShardedModel.write_rows`` was given; or that of a module's rows in it.
        table: its name.
        module: the dynamic module that has it, where several have a table of that name.

    Yields:
        some rows at a time, in no order.

    Raises:
        SetupError: as :func:`check_rows`; no module has such a table, or several.
    """
    yield from _all_rows(_of_module(Path(folder), table, module), table, None)


def _all_rows(folder: Path, table: str, columns: Columns | None) -> Iterator[StoredRows]:
    for name in _lists(folder, table):
        try:
            for file in _listed(folder / name):
                yield _rows(folder, file, columns)
        except (OSError, ValueError) as error:
            raise _unreadable(folder, table, str(error)) from error


def _of_module(folder: Path, table: str, module: str | None) -> Path:
    """Where the lists of a table's files are: *folder*, or a module's below it."""
    if module is None and any(folder.glob(f"{escape(table)}.rank-*-of-*.json")):
        return folder
    below = folder / "rows"
    names = {one.parent.name for one in below.glob(f"*/{escape(table)}.rank-*-of-*.json")}
    found = names if module is None else names & {module}
    if not names and not below.is_dir():
        return folder  # whose own lack says more
    if len(found) == 1:
        return below / found.pop()
    there = sorted({file.name.split(".rank-")[0] for file in below.glob("*/*.rank-*-of-*.json")})
    raise SetupError(
        f"{str(folder)!r} has rows of table {table!r} in the modules {sorted(names) or 'none'}, and of the tables"
        f" {there or 'none'}; name one of these tables, and with module= one of the modules if there are several"
    )


def _lists(folder: Path, table: str) -> list[str]:
    """Names of the ranks' lists of files."""
    found = {file.name for file in folder.glob(f"{escape(table)}.rank-*-of-*.json")}
    names = [f"{table}.rank-{rank}-of-{len(found)}.json" for rank in range(len(found))]
    if not found or found != set(names):
        there = ", ".join(sorted(found)) or "none"
        raise _unreadable(folder, table, f"the lists of files there are {there}; needed is one of each rank of one run")
    return names


@dataclass(frozen=True)
class _File:
    """A file, as its rank has listed it."""

    name: str
    rows: int
    bytes: int
    crc32: int


def _listed(path: Path) -> Iterator[_File]:
    """What a rank says of its files: text as :func:`write_rows` writes it and no other, whatever JSON allows.

    Raises:
        OSError: it cannot be read.
        ValueError: it is something else.
    """
    with open_regular(path, _LARGEST_LIST) as file:
        text = file.read()
    if text == b"[]":
        return
    place = 1
    for number in itertools.count():
        name = f"{path.stem}.{number:05}.pt"
        begin = f'{{"name": {json.dumps(name)}, "rows": '.encode()
        found = _NUMBERS.match(text, place + len(begin))
        if text[:1] != b"[" or not text.startswith(begin, place) or found is None:
            raise ValueError(
                f"entry {number} of {path.name} is {text[place : place + 100]!r}, expected name ({name}), rows, bytes"
                " and crc32"
            )
        yield _File(name, *(int(part) for part in found.groups()[:3]))
        place = found.end()
        if found[4] == b"]":
            break
    if place != len(text):
        raise ValueError(f"{path.name} goes on after its list: {text[place : place + 100]!r}")


def _rows(folder: Path, listed: _File, columns: Columns | None) -> StoredRows:
    """The rows of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not as listed, or holds something else.
    """
    with open_regular(folder / listed.name, _LARGEST_FILE) as file:
        size = file.seek(0, io.SEEK_END)
        if size != listed.bytes:
            raise ValueError(f"{listed.name} has {size} bytes, expected {listed.bytes}")
        if (found := checksum(file)) != listed.crc32:
            raise ValueError(f"{listed.name} has the checksum {found}, expected {listed.crc32}")
        try:
            return _checked(read_tensors(file), listed, columns)
        except ValueError as error:
            raise ValueError(f"{listed.name}: {error}") from error


def _checked(contents: Any, listed: _File, columns: Columns | None) -> StoredRows:
    names = ("ids", "counts", "last_seen", "columns")
    if type(contents) is not dict or contents.keys() != set(names) or type(contents["columns"]) is not list:
        raise ValueError(f"expected {', '.join(names)}, which is a list")
    for name in names[:3]:
        _expect(name, contents[name], ((), torch.int64), listed.rows)
    found = contents["columns"]
    if not found or (columns is not None and len(columns) != len(found)):
        raise ValueError(f"columns are {len(found)}, expected {len(columns) if columns else 'at least one'}")
    for number, column in enumerate(found):
        _expect(f"columns[{number}]", column, None if columns is None else columns[number], listed.rows)
    return StoredRows(*(contents[name] for name in names))


def _expect(name: str, value: Any, expected: Column | None, rows: int) -> None:
    if not isinstance(value, torch.Tensor) or not value.dim():
        raise ValueError(f"{name} is no tensor of rows")
    shape, dtype = (tuple(value.shape[1:]), value.dtype) if expected is None else expected
    if (tuple(value.shape), value.dtype) != ((rows, *shape), dtype):
        raise ValueError(f"{name} is {value.dtype} {list(value.shape)}, expected {dtype} {[rows, *shape]}")


def _unreadable(folder: Path, table: str, why: str) -> SetupError:
    return SetupError(
        f"rows of dynamic table {table} cannot be read from {str(folder)!r}: {why}. Needed are all files as they were"
        " written: bring them back, or go on from another checkpoint"
    )


_NAME = re.compile(r"\.rank-(\d+)-of-(\d+)\.")


def _of(file: Path, table: str, ranks: int) -> bool:
    found = _NAME.search(file.name[len(table) :])
    return found is not None and int(found[2]) == ranks


def _is(file: Path, rank: int) -> bool:
    found = _NAME.search(file.name)
    return found is not None and int(found[1]) == rank
