"""Rows of each table of a checkpoint as Parquet files, with their ids."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipe._compat.managed_collision import ENTRIES_OF_MAP, NO_ID, name_of_map
from lightning_pipe.checkpoints.folder_reading import read_metadata, read_rest, read_whole
from lightning_pipe.checkpoints.folder_writing import DYNAMIC_ROWS
from lightning_pipe.checkpoints.remote_folder import open_folder, place_of
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.store.row_files import read_rows

__all__ = ["write_tables"]

_CHUNK = 65_536  # rows of a row group


def write_tables(checkpoint: str | Path, folder: str | Path, *, weights_only: bool | None = None) -> dict[str, int]:
    """Write one Parquet file for each table of a checkpoint folder. Runs in one process.

    Columns are ``id`` (int64), the row number of a table of fixed size or the id that a map or a dynamic table gives a
    row to, and ``vector``, a fixed-size list of float32. Rows that no id has are left out.

    Args:
        checkpoint: folder, or its URL, that a ``recsys_*`` strategy wrote on any number of ranks.
        folder: folder for the files, ``NAME.parquet`` with the full name of each table; made if it does not exist.
        weights_only: see :func:`~lightning_pipe.checkpoints.export.export_checkpoint`.

    Returns:
        Number of rows by file name.

    Raises:
        SetupError: the folder is not a checkpoint of sharded tables, or is damaged.
    """
    place, target = place_of(checkpoint), Path(folder)
    source = open_folder(place)
    saved = read_metadata(source, ("model",), "under a recsys plan. Use the path of such a folder")
    rest = read_rest(source, weights_only)
    target.mkdir(parents=True, exist_ok=True)
    written: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix=".tables.", dir=target) as beside:
        values: Mapping[str, Any] = read_whole(source, saved, weights_only, "model", Path(beside)).get("model", {})
        for name, table in values.items():
            if re.fullmatch(r"(?:.*\.)?embedding(?:s|_bags)\.[^.]+\.weight", name):
                written[f"{name}.parquet"] = _write(target / f"{name}.parquet", _rows(name, table, values))
    for module, described in (rest.get(DYNAMIC_ROWS) or {}).items():
        for table in described["tables"]:
            chunks = ((one.ids, one.columns[0]) for one in read_rows(checkpoint, table, module))
            name = f"{module}.{table}.parquet" if module else f"{table}.parquet"
            written[name] = _write(target / name, chunks)
    if not written:
        raise SetupError(f"the checkpoint {str(checkpoint)!r} has no tables. Use one of a recsys strategy")
    return written


def _rows(name: str, table: Tensor, values: Mapping[str, Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids and rows of a table of fixed size, in chunks."""
    ids, rows = torch.arange(len(table)), torch.arange(len(table))
    if (of_map := name_of_map(name)) and f"{of_map}.{ENTRIES_OF_MAP[0]}" in values:
        ids, rows = (values[f"{of_map}.{entry}"] for entry in ENTRIES_OF_MAP)
        taken = ids != NO_ID
        ids, rows = ids[taken], rows[taken]
    for some_ids, some_rows in zip(ids.split(_CHUNK), rows.split(_CHUNK), strict=True):
        yield some_ids, table[some_rows]


def _write(file: Path, chunks: Iterator[tuple[Tensor, Tensor]]) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    count, writer = 0, None
    try:
        for ids, rows in chunks:
            vectors = np.ascontiguousarray(rows.float().numpy())
            if writer is None:
                kind = pa.list_(pa.float32(), vectors.shape[1])
                writer = pq.ParquetWriter(file, pa.schema({"id": pa.int64(), "vector": kind}))
            lists = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), vectors.shape[1])
            writer.write_table(pa.table({"id": pa.array(ids.numpy()), "vector": lists}))
            count += len(ids)
    finally:
        if writer is not None:
            writer.close()
    return count
