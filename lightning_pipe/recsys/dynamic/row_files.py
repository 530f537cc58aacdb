"""Rows of dynamic tables as files: what a checkpoint and an export are made of.

    rows.json                        the tables: columns, optimiser; and how many batches were trained
    <table>.rank-0-of-2.00000.pt     ids, counts, the batches they were last seen in, and a tensor for each column

Every rank writes its own; any number of ranks can read them. Ids are the user's own, not mixed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_pipe.engine.errors import SetupError

__all__ = ["Rows", "read_description", "read_rows", "write_description", "write_rows"]

_DESCRIPTION = "rows.json"


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


def write_description(folder: Path, description: Mapping[str, Any]) -> None:
    """Write what is the same on every rank; one rank calls this."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _DESCRIPTION).write_text(json.dumps(description, indent=1, sort_keys=True))


def read_description(folder: Path) -> dict[str, Any]:
    """What :func:`write_description` wrote.

    Raises:
        SetupError: there is none, or it is damaged.
    """
    path = folder / _DESCRIPTION
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SetupError(
            f"rows of dynamic tables cannot be read from {str(folder)!r}: {error}; needed is a folder that a checkpoint"
            " or an export has written"
        ) from error
    return found


def write_rows(folder: Path, table: str, rank: int, ranks: int, chunks: Iterator[Rows]) -> int:
    """Write this rank's rows of a table, a file for each of *chunks*; returns how many rows there were."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for number, rows in enumerate(chunks):
        contents = {
            "ids": rows.ids,
            "counts": rows.counts,
            "last_seen": rows.last_seen,
            # A view would bring all that it is a view of.
            "columns": [column.contiguous().clone() if column._is_view() else column for column in rows.columns],
        }
        torch.save(contents, folder / f"{table}.rank-{rank}-of-{ranks}.{number:05}.pt")
        count += len(rows.ids)
    return count


def read_rows(folder: Path, table: str) -> Iterator[Rows]:
    """All ranks' rows of a table, as they were written.

    Raises:
        SetupError: a file is damaged or missing.
    """
    prefix = f"{table}.rank-"
    files = sorted(file for file in folder.iterdir() if file.name.startswith(prefix) and file.suffix == ".pt")
    for file in files:
        try:
            contents = torch.load(file, map_location="cpu", weights_only=True)
            rows = Rows(contents["ids"], contents["counts"], contents["last_seen"], list(contents["columns"]))
        except Exception as error:  # of the file system, of pickle, of zip, ...
            raise SetupError(
                f"rows of dynamic table {table} cannot be read from {str(file)!r}: {error}; needed is the file as it"
                " was written"
            ) from error
        yield rows
