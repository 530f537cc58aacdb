"""Rows of dynamic tables as files: what a checkpoint and an export are made of.

    <table>.rank-0-of-2.00000.pt     ids, counts, the batches they were last seen in, and a tensor for each column
    <table>.rank-0-of-2.json         the rank's files: how many rows each has, its bytes and their checksum

Every rank writes its own; any number of ranks can read them. Ids are the user's own, not mixed.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_pipe.engine.errors import SetupError

__all__ = ["Rows", "check_rows", "read_rows", "write_rows"]


@dataclass(frozen=True)
class Rows:
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


def write_rows(folder: Path, table: str, rank: int, ranks: int, chunks: Iterator[Rows]) -> int:
    """Write this rank's rows of a table, a file for each of *chunks*; returns how many rows there were.

    Raises:
        SetupError: the folder has rows of the table already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    there = [file.name for file in folder.glob(f"{table}.rank-*") if not _of(file, table, ranks) or _is(file, rank)]
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
            "columns": [column.contiguous().clone() if column._is_view() else column for column in rows.columns],
        }
        buffer = io.BytesIO()
        torch.save(contents, buffer)
        packed = buffer.getvalue()
        name = f"{table}.rank-{rank}-of-{ranks}.{number:05}.pt"
        (folder / name).write_bytes(packed)
        files.append({"name": name, "rows": len(rows.ids), "bytes": len(packed), "crc32": zlib.crc32(packed)})
    (folder / f"{table}.rank-{rank}-of-{ranks}.json").write_text(json.dumps(files))
    return sum(int(file["rows"]) for file in files)


def check_rows(folder: Path, tables: Iterable[str]) -> None:
    """Looks whether all ranks' rows of each table are there, and as they were written. Reads every file.

    Raises:
        SetupError: a file is damaged or missing, or they are not of one number of ranks.
    """
    for table in tables:
        for file in _files(folder, table):
            _contents(folder, table, file)


def read_rows(folder: str | Path, table: str, module: str | None = None) -> Iterator[Rows]:
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
    folder = _of_module(Path(folder), table, module)
    for file in _files(folder, table):
        packed = _contents(folder, table, file)
        contents = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=True)
        yield Rows(contents["ids"], contents["counts"], contents["last_seen"], list(contents["columns"]))


def _of_module(folder: Path, table: str, module: str | None) -> Path:
    """Where the lists of a table's files are: *folder*, or a module's below it."""
    if module is None and any(folder.glob(f"{table}.rank-*-of-*.json")):
        return folder
    below = folder / "rows"
    names = {one.parent.name for one in below.glob(f"*/{table}.rank-*-of-*.json")}
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


def _files(folder: Path, table: str) -> list[dict[str, Any]]:
    """What the ranks say of their files."""
    lists = sorted(folder.glob(f"{table}.rank-*-of-*.json"))
    ranks = {int(found[2]) for file in lists if (found := _NAME.search(file.name))}
    if len(ranks) != 1 or len(lists) != next(iter(ranks)):
        names = ", ".join(file.name for file in lists) or "none"
        raise _unreadable(folder, table, f"the lists of files there are {names}; needed is one of each rank of one run")
    try:
        return [file for one in lists for file in json.loads(one.read_text())]
    except (OSError, ValueError) as error:
        raise _unreadable(folder, table, str(error)) from error


def _contents(folder: Path, table: str, file: dict[str, Any]) -> bytes:
    try:
        packed = (folder / file["name"]).read_bytes()
    except OSError as error:
        raise _unreadable(folder, table, str(error)) from error
    if (len(packed), zlib.crc32(packed)) != (file["bytes"], file["crc32"]):
        raise _unreadable(
            folder,
            table,
            f"{file['name']} has {len(packed)} bytes with the checksum {zlib.crc32(packed)}, and was written with"
            f" {file['bytes']} and {file['crc32']}",
        )
    return packed


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
