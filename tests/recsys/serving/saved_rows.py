"""Checkpoints of dynamic tables, made without training, and the rows of their exports."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightning_pipe.checkpoints.folder_writing import DYNAMIC_ROWS, META
from lightning_pipe.recsys.dynamic.store.row_files import StoredRows, write_rows

# Last batch and weights of each id.
History = Mapping[int, tuple[int, Tensor]]
WIDTH = 3


def described(**widths: int) -> dict[str, Any]:
    """Description of a module's tables."""
    tables = {name: {"optimizer": "SGD", "columns": [[[width], "torch.float32"]]} for name, width in widths.items()}
    return {"version": "1", "progress": {"step": "9"}, "tables": tables}


def save(
    folder: Path, tables: Mapping[str, History], ranks: int = 1, rest: Any = None, width: int = WIDTH, step: int = 0
) -> Path:
    """A checkpoint whose module "bags" has these tables, each in files of several ranks and in chunks of two rows.

    Args:
        folder: the checkpoint.
        tables: rows of each table.
        ranks: number of ranks whose files have the rows.
        rest: description of the tables, if it is not the right one.
        width: number of weights of a row.
        step: number of trained batches.
    """
    with warnings.catch_warnings(action="ignore"):  # that there is one rank
        dcp.save({"model": {"over": torch.ones(1)}}, checkpoint_id=folder)
    right = {"bags": described(**dict.fromkeys(tables, width))} if tables else None
    torch.save({DYNAMIC_ROWS: right if rest is None else rest, "global_step": step}, folder / META)
    for name, rows in tables.items():
        for rank in range(ranks):
            items = list(rows.items())[rank::ranks]
            chunks = (items[place : place + 2] for place in range(0, len(items), 2))
            write_rows(folder / "rows" / "bags", name, rank, ranks, (stored(dict(one)) for one in chunks))
    return folder


def stored(rows: History) -> StoredRows:
    last_seen = torch.tensor([batch for batch, _ in rows.values()])
    weights = torch.stack([one for _, one in rows.values()])
    return StoredRows(torch.tensor(list(rows)), torch.ones_like(last_seen), last_seen, [weights])


def bits_of(file: Path) -> dict[int, bytes]:
    """Bytes of the vector of each id."""
    table = pq.read_table(file)
    width = table.schema.field("vector").type.list_size
    bits = table["vector"].combine_chunks().values.to_numpy().view(np.uint32).reshape(-1, width)
    found = {number: row.tobytes() for number, row in zip(table["id"].to_pylist(), bits, strict=True)}
    assert len(found) == len(table)
    return found


def exported(folder: Path) -> dict[str, dict[int, bytes]]:
    """Rows of each table of an export or a diff, without those of removed ids."""
    files = [file for file in folder.glob("*.parquet") if not file.name.endswith(".removed.parquet")]
    return {file.name.removesuffix(".parquet"): bits_of(file) for file in files}


def removed(folder: Path) -> dict[str, list[int]]:
    """Removed ids of each table of a diff."""
    ending = ".removed.parquet"
    return {file.name.removesuffix(ending): pq.read_table(file)["id"].to_pylist() for file in folder.glob(f"*{ending}")}
