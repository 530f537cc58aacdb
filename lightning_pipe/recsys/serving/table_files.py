"""Rows of each table of a checkpoint as Parquet files, with their ids."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipe._compat.managed_collision import ENTRIES_OF_MAP, NO_ID, id_map_name
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
from lightning_pipe.recsys.dynamic.store.row_files import StoredRows, read_rows

try:
    import pyarrow as pa
    import pyarrow.parquet as pq
except ImportError as error:
    raise SetupError(
        f"Parquet files need the package pyarrow, which cannot be imported: {error}. Install lightning-pipe[data]"
    ) from error

_CHUNK = 65_536  # rows of a row group

# Rows of a dynamic table, whose first column are the weights, and the number of weights of a row. They are read once.
Rows = tuple[Iterator[StoredRows], int]


def write_tables_to_parquet(
    checkpoint: str | Path, folder: str | Path, *, weights_only: bool | None = None
) -> dict[str, int]:
    """Write one Parquet file for each table of a checkpoint folder. Runs in one process.

    Columns are ``id`` (int64), the row number of a table of fixed size or the id that a map or a dynamic table gives a
    row to, and ``vector``, a fixed-size list of float32. Rows that no id has are left out.
    """
    target = Path(folder)
    source, first_rank_values, saved = read_checkpoint(checkpoint, weights_only)
    target.mkdir(parents=True, exist_ok=True)
    written: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix=".tables.", dir=target) as beside:
        values: Mapping[str, Any] = read_full_state(source, saved, weights_only, "model", Path(beside)).get("model", {})
        for name, table in values.items():
            if re.fullmatch(r"(?:.*\.)?embedding(?:s|_bags)\.[^.]+\.weight", name):
                written[f"{name}.parquet"] = write_vectors_to_parquet(
                    target, name, table.shape[1], _iterate_table_rows(name, table, values)
                )
    if first_rank_values.get(DYNAMIC_ROWS):
        with open_checkpoint_dynamic_tables(source, first_rank_values) as tables:
            for name, (rows, width) in tables.items():
                chunks = ((chunk.ids, chunk.columns[0]) for chunk in rows)
                written[f"{name}.parquet"] = write_vectors_to_parquet(target, name, width, chunks)
    if not written:
        raise SetupError(f"the checkpoint {str(checkpoint)!r} has no tables. Use one of a recsys strategy")
    return written


def read_checkpoint(checkpoint: str | Path, weights_only: bool | None = None) -> tuple[Folder, dict[str, Any], Any]:
    """Folder with the files of a checkpoint, the values that rank 0 wrote, and the metadata."""
    source = follow_checkpoint_marker(parse_local_or_remote_path(checkpoint))
    saved = read_metadata(source, ("model",), "under a recsys plan. Use the path of such a folder")
    return source, read_extra_state(source, weights_only), saved


@contextmanager
def open_checkpoint_dynamic_tables(source: Folder, first_rank_values: Mapping[str, Any]) -> Iterator[dict[str, Rows]]:
    """Dynamic tables of an open checkpoint by full name, to be read inside the block."""
    if not (modules := first_rank_values.get(DYNAMIC_ROWS)):
        raise SetupError(f"the checkpoint {str(source)!r} has no dynamic tables. Use one of a model that has some")
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
            f"{module}.{table}" if module else table: (_read_dynamic_rows(local, module, table, width), width)
            for (module, table), width in widths.items()
        }


def _read_dynamic_rows(folder: Path, module: str, table: str, width: int) -> Iterator[StoredRows]:
    for rows in read_rows(folder, table, module or "module"):
        weights = rows.columns[0]
        if weights.shape[1:] != (width,) or not weights.is_floating_point():
            raise SetupError(
                f"rows of dynamic table {table} in {str(folder)!r} have weights {weights.dtype} {list(weights.shape)},"
                f" expected floating-point numbers [n, {width}]. Use another checkpoint"
            )
        yield rows


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
