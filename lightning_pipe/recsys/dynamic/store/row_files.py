"""Files with the rows of dynamic tables, for checkpoints and exports.

    <table>.rank-0-of-2.00000.pt     ids, counts, steps in which the rows were last seen, and a tensor for each column
    <table>.rank-0-of-2.json         list of the rank's files: number of rows, size in bytes and checksum of each

Every rank writes its own rows. Any number of ranks can read them. Ids are the original ids, not mixed ones.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import torch

from lightning_pipe._compat.torch import is_view
from lightning_pipe.checkpoints.remote_folder import follow_checkpoint_marker, local_copy, parse_local_or_remote_path
from lightning_pipe.engine.common.durable_files import fsync_parents, write_and_fsync
from lightning_pipe.engine.common.errors import SetupError

# Shape of a row in the column, and type of the column.
Column = tuple[tuple[int, ...], torch.dtype]
Columns = Sequence[Column]

_LARGEST_LIST = 1 << 26  # bytes


@dataclass(frozen=True)
class StoredRows:
    """Chunk of one table's rows.

    Attributes:
        ids: ids of the rows, int64 [n].
        counts: number of trained batches in which each id has occurred, int64 [n].
        last_seen: number of the last such batch, int64 [n].
        columns: weights [n, dimensions] and the optimizer's states, each [n] or [n, dimensions].
    """

    ids: torch.Tensor
    counts: torch.Tensor
    last_seen: torch.Tensor
    columns: list[torch.Tensor]


def rows_folder(checkpoint: Path, module: str) -> Path:
    """Folder of a module's rows in a checkpoint."""
    return checkpoint / "rows" / (module or "module")


def write_rows(folder: Path, table: str, rank: int, ranks: int, chunks: Iterator[StoredRows]) -> int:
    """Write this rank's rows of a table durably, one file for each chunk."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = f"{table}.rank-{rank}-of-{ranks}"
    lists = folder.glob(f"{escape(table)}.rank-*-of-*.json")
    existing = [file.name for file in lists if file.stem == prefix or not file.stem.endswith(f"-of-{ranks}")]
    if existing:
        raise SetupError(
            f"rows of dynamic table {table} cannot be written to {str(folder)!r}, which already has rows of it, such"
            f" as {sorted(existing)[0]}. Choose another folder, or remove this one"
        )
    files: list[dict[str, Any]] = []
    for number, rows in enumerate(chunks):
        contents = {
            "ids": rows.ids,
            "counts": rows.counts,
            "last_seen": rows.last_seen,
            # Saving a view would save its whole storage.
            "columns": [column.contiguous().clone() if is_view(column) else column for column in rows.columns],
        }
        buffer = io.BytesIO()
        torch.save(contents, buffer)
        packed = buffer.getvalue()
        name = f"{prefix}.{number:05}.pt"
        write_and_fsync(folder / name, packed)
        files.append({"name": name, "rows": len(rows.ids), "bytes": len(packed), "crc32": zlib.crc32(packed)})
    list_file = folder / f"{prefix}.json"
    write_and_fsync(list_file, json.dumps(files).encode())
    fsync_parents(list_file)
    return sum(int(file["rows"]) for file in files)


def check_row_files(folder: Path, tables: Mapping[str, Columns | None]) -> None:
    """Check that all ranks' rows of each table exist and are undamaged. Reads every file."""
    for table, columns in tables.items():
        for _ in _read_files_of_all_ranks(folder, table, columns):
            pass


def read_rows(folder: str | Path, table: str, module: str | None = None) -> Iterator[StoredRows]:
    """Read all ranks' rows of a table from files, without a model or other ranks.

    Args:
        folder: folder of a checkpoint, or its URL, the folder given to ``ShardedModel.write_rows_to_folder``, or the
            folder of one module's rows inside it.
        table: name of the table.
        module: name of the dynamic module of the table (default None: the only module with this table). Set it if
            several modules have a table of this name.

    Yields:
        Chunks of rows, in no particular order.

    Raises:
        SetupError: A file is damaged, missing or has other contents, see :func:`check_row_files`; or no module, or
            more than one, has such a table.
    """
    with local_copy(follow_checkpoint_marker(parse_local_or_remote_path(folder)), "rows") as local:
        yield from _read_files_of_all_ranks(_find_table_row_folder(local, table, module), table, None)


def _read_files_of_all_ranks(folder: Path, table: str, columns: Columns | None) -> Iterator[StoredRows]:
    for name in _find_file_lists(folder, table):
        try:
            for file in _parse_file_list(folder / name):
                yield _read_row_file(folder, file, columns)
        except (OSError, ValueError) as error:
            raise _unreadable_rows_error(folder, table, str(error)) from error


def _find_table_row_folder(folder: Path, table: str, module: str | None) -> Path:
    """Folder with the lists of a table's files: *folder*, or a module's folder below it."""
    below, lists = folder / "rows", f"{escape(table)}.rank-*-of-*.json"
    if not below.is_dir() or (module is None and any(folder.glob(lists))):
        return folder
    names = {file.parent.name for file in below.glob(f"*/{lists}")}
    matches = names if module is None else names & {module}
    if len(matches) == 1:
        return below / matches.pop()
    tables = sorted({file.name.split(".rank-")[0] for file in below.glob("*/*.rank-*-of-*.json")})
    raise SetupError(
        f"{str(folder)!r} has rows of table {table!r} in the modules {sorted(names) or 'none'}, and rows of the tables"
        f" {tables or 'none'}. Name one of these tables, and pass module= if several modules have it"
    )


def _find_file_lists(folder: Path, table: str) -> list[str]:
    """Names of all ranks' lists of files."""
    lists = {file.name for file in folder.glob(f"{escape(table)}.rank-*-of-*.json")}
    names = [f"{table}.rank-{rank}-of-{len(lists)}.json" for rank in range(len(lists))]
    if not lists or lists != set(names):
        shown = ", ".join(sorted(lists)) or "none"
        raise _unreadable_rows_error(
            folder, table, f"the lists of files found are {shown}, expected one list from each rank of a run"
        )
    return names


@dataclass(frozen=True)
class _File:
    """Entry of a file in its rank's list."""

    name: str
    rows: int
    bytes: int
    crc32: int


def _parse_file_list(path: Path) -> list[_File]:
    """Parse a rank's list of files."""
    try:
        files = [_File(**entry) for entry in json.loads(_read_file_with_size_limit(path, _LARGEST_LIST))]
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: {error}") from error
    names = [f"{path.stem}.{number:05}.pt" for number in range(len(files))]
    if [file.name for file in files] != names:
        raise ValueError(f"{path.name} lists other files than {', '.join(names[:3])}, ...")
    return files


def _read_file_with_size_limit(path: Path, largest: int) -> bytes:
    if not path.is_file():
        raise ValueError(f"{path.name} is not a file, or there is no such file")
    if (size := path.stat().st_size) > largest:
        raise ValueError(f"{path.name} has {size} bytes, expected {largest} at most")
    return path.read_bytes()


def _read_row_file(folder: Path, entry: _File, columns: Columns | None) -> StoredRows:
    """Read the rows of a file."""
    content = _read_file_with_size_limit(folder / entry.name, entry.bytes)
    if len(content) < entry.bytes:
        raise ValueError(f"{entry.name} has {len(content)} bytes, expected {entry.bytes}")
    if (checksum := zlib.crc32(content)) != entry.crc32:
        raise ValueError(f"{entry.name} has the checksum {checksum}, expected {entry.crc32}")
    try:
        return _check_row_contents(
            torch.load(io.BytesIO(content), map_location="cpu", weights_only=True), entry, columns
        )
    except Exception as error:  # a file that was not written here can cause any error
        raise ValueError(f"{entry.name}: {error}") from error


def _check_row_contents(contents: Any, entry: _File, columns: Columns | None) -> StoredRows:
    names = ("ids", "counts", "last_seen", "columns")
    if type(contents) is not dict or contents.keys() != set(names) or type(contents["columns"]) is not list:
        raise ValueError(f"expected the entries {', '.join(names)}, the last a list")
    for name in names[:3]:
        _check_tensor_shape_and_dtype(name, contents[name], ((), torch.int64), entry.rows)
    tensors = contents["columns"]
    if not tensors or (columns is not None and len(columns) != len(tensors)):
        raise ValueError(f"it has {len(tensors)} columns, expected {len(columns) if columns else 'at least one'}")
    for number, column in enumerate(tensors):
        _check_tensor_shape_and_dtype(
            f"columns[{number}]", column, None if columns is None else columns[number], entry.rows
        )
    return StoredRows(*(contents[name] for name in names))


def _check_tensor_shape_and_dtype(name: str, value: Any, expected: Column | None, rows: int) -> None:
    if type(value) is not torch.Tensor or not value.dim() or not value.is_contiguous() or value.requires_grad:
        raise ValueError(f"{name} is not a plain tensor with rows")
    shape, dtype = (tuple(value.shape[1:]), value.dtype) if expected is None else expected
    if (tuple(value.shape), value.dtype) != ((rows, *shape), dtype):
        raise ValueError(f"{name} is {value.dtype} {list(value.shape)}, expected {dtype} {[rows, *shape]}")


def _unreadable_rows_error(folder: Path, table: str, why: str) -> SetupError:
    return SetupError(
        f"rows of dynamic table {table} cannot be read from {str(folder)!r}: {why}. Restore the files as they were"
        " written, or resume from another checkpoint"
    )
