"""Rows of each table of a checkpoint as Parquet files, with their ids."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipe._compat.managed_collision import ENTRIES_OF_MAP, NO_ID, id_map_name, is_id_map_entry
from lightning_pipe.checkpoints.folder_reading import read_extra_state, read_full_state, read_metadata
from lightning_pipe.checkpoints.folder_writing import DYNAMIC_ROWS
from lightning_pipe.checkpoints.remote_folder import (
    Folder,
    follow_checkpoint_marker,
    local_copy,
    parse_local_or_remote_path,
)
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.common.safe_text import short_repr
from lightning_pipe.recsys.dynamic.store.row_files import read_rows

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise SetupError(
        f"Parquet files need the package pyarrow, which cannot be imported: {error}. Install lightning-pipe[data]"
    ) from error

EXPORT = "export.json"
_CHUNK = 65_536  # rows of a row group

# Ids and vectors of a table in chunks, which are read once, and the number of values of a vector.
Rows = tuple[Iterator[tuple[Tensor, Tensor]], int]


@dataclass(frozen=True)
class CheckpointTables:
    """Tables of an open checkpoint by full name, its other tensors without maps of ids, and its ``global_step``."""

    rows: dict[str, Rows]
    dense: dict[str, Tensor]
    step: int | None


def write_tables_to_parquet(
    checkpoint: str | Path, folder: str | Path, *, weights_only: bool | None = None
) -> dict[str, int]:
    """Write one Parquet file for each table of a checkpoint folder. Runs in one process.

    Columns are ``id`` (int64), the row number of a table of fixed size or the id that a map or a dynamic table gives a
    row to, and ``vector``, a fixed-size list of float32. Rows that no id has are left out. ``export.json`` has the
    ``step`` of the checkpoint.
    """
    target = Path(folder)
    with open_checkpoint_tables(checkpoint, target, weights_only) as tables:
        written = {
            f"{name}.parquet": write_vectors_to_parquet(target, name, width, rows)
            for name, (rows, width) in tables.rows.items()
        }
        (target / EXPORT).write_text(json.dumps({"step": tables.step}) + "\n")
    return written


@contextmanager
def open_checkpoint_tables(
    checkpoint: str | Path, folder: Path, weights_only: bool | None = None, since: int | None = None
) -> Iterator[CheckpointTables]:
    """Values of a checkpoint, to be read inside the block.

    Tables of fixed size are copied to temporary files in *folder*, which are mapped into memory. If *since* is the
    number of a batch, rows are those that this batch or a later one has seen, and all tables must be dynamic.
    """
    source = follow_checkpoint_marker(parse_local_or_remote_path(checkpoint))
    saved = read_metadata(source, ("model",), "under a recsys plan. Use the path of such a folder")
    first_rank_values = read_extra_state(source, weights_only)
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".tables.", dir=folder)))
        values: Mapping[str, Any] = read_full_state(source, saved, weights_only, "model", scratch).get("model", {})
        tables: dict[str, Rows] = {
            name: (_iterate_table_rows(name, table, values), table.shape[1])
            for name, table in values.items()
            if re.fullmatch(r"(?:.*\.)?embedding(?:s|_bags)\.[^.]+\.weight", name)
        }
        if tables and since is not None:
            raise SetupError(
                f"the checkpoint {str(source)!r} has tables that are not dynamic, such as {min(tables)!r}, whose rows"
                " have no batch numbers. Give the older checkpoint instead of a number"
            )
        dense = {
            name: value
            for name, value in values.items()
            if isinstance(value, Tensor) and name not in tables and not is_id_map_entry(name)
        }
        if first_rank_values.get(DYNAMIC_ROWS):
            tables |= stack.enter_context(_open_dynamic_tables(source, first_rank_values, since))
        if not tables:
            raise SetupError(f"the checkpoint {str(source)!r} has no tables. Use one of a recsys strategy")
        yield CheckpointTables(tables, dense, first_rank_values.get("global_step"))


@contextmanager
def _open_dynamic_tables(
    source: Folder, first_rank_values: Mapping[str, Any], since: int | None
) -> Iterator[dict[str, Rows]]:
    """Dynamic tables of an open checkpoint by full name, to be read inside the block."""
    modules = first_rank_values[DYNAMIC_ROWS]
    widths: dict[tuple[str, str], int] = {}
    try:
        for module, described in modules.items():
            for table, description in described["tables"].items():
                [width], _ = description["columns"][0]
                if type(width) is not int or not 0 < width < 1 << 31 or "/" in module + table:
                    raise ValueError
                widths[module, table] = width
    except (AttributeError, LookupError, TypeError, ValueError):
        raise SetupError(
            f"the checkpoint {str(source)!r} has a damaged description of dynamic tables: expected names and columns,"
            f" got {short_repr(modules)}. Use another checkpoint"
        ) from None
    with local_copy(source, "rows") as local:
        yield {
            f"{module}.{table}" if module else table: (_read_dynamic_rows(local, module, table, width, since), width)
            for (module, table), width in widths.items()
        }


def _read_dynamic_rows(
    folder: Path, module: str, table: str, width: int, since: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    for rows in read_rows(folder, table, module or "module"):
        weights = rows.columns[0]
        if weights.shape[1:] != (width,) or not weights.is_floating_point():
            raise SetupError(
                f"rows of dynamic table {table} in {str(folder)!r} have weights {weights.dtype} {list(weights.shape)},"
                f" expected floating-point numbers [n, {width}]. Use another checkpoint"
            )
        seen = slice(None) if since is None else rows.last_seen >= since
        yield rows.ids[seen], weights[seen]


def _iterate_table_rows(name: str, table: Tensor, values: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and rows of a table of fixed size, in chunks."""
    ids, rows = torch.arange(len(table)), torch.arange(len(table))
    if (of_map := id_map_name(name)) and f"{of_map}.{ENTRIES_OF_MAP[0]}" in values:
        ids, rows = (values[f"{of_map}.{entry}"] for entry in ENTRIES_OF_MAP)
        mapped = ids != NO_ID
        ids, rows = ids[mapped], rows[mapped]
    for some_ids, some_rows in zip(ids.split(_CHUNK), rows.split(_CHUNK), strict=True):
        yield some_ids, table[some_rows]


def write_vectors_to_parquet(folder: Path, name: str, width: int, chunks: Iterator[tuple[Tensor, Tensor]]) -> int:
    """Write ids and vectors [n, width] of a table to ``NAME.parquet``, and return the number of rows."""
    if {"/", "\0"} & {*name}:  # it would be a file elsewhere
        raise SetupError(f"the table name {name!r} cannot name a file, since it has a slash. Use another checkpoint")
    count, schema = 0, pa.schema({"id": pa.int64(), "vector": pa.list_(pa.float32(), width)})
    with pq.ParquetWriter(folder / f"{name}.parquet", schema) as writer:
        for ids, rows in chunks:
            vectors = np.ascontiguousarray(rows.float().numpy())
            lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), width)
            writer.write_table(pa.table({"id": pa.array(ids.numpy()), "vector": lists}))
            count += len(ids)
    return count
