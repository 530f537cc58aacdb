"""Differences of the tables of two checkpoints, as Parquet files, and their application to an export of the older."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.serving.table_files import (
    EXPORT,
    CheckpointTables,
    Rows,
    open_checkpoint_tables,
    pa,
    pq,
    write_vectors_to_parquet,
)

_DIFF = "diff.json"


def write_row_diff(checkpoint: str | Path, since: str | Path | int, folder: str | Path) -> dict[str, int]:
    """Write the rows of tables that differ from an older checkpoint, and return the number in each file.

    ``NAME.parquet`` has the rows that are new or have other weights (compared by their bits as float32), as
    :func:`~lightning_pipe.recsys.serving.table_files.write_tables_to_parquet` writes them. ``NAME.removed.parquet`` has
    the ids that only the older checkpoint has. The older rows with both changes are exactly the newer ones, for any two
    checkpoints. ``dense.pt`` has the newer checkpoint's other tensors by name, without maps of ids. ``diff.json`` has
    ``since_step`` and ``step``, the ``global_step`` of both checkpoints, and ``tables``: the number of rows of each
    table of the newer checkpoint, and null for a table that only the older one has.

    If *since* is the number of a batch, all tables must be dynamic, their rows last seen in this batch or later are
    written, and removed ids are unknown.

    Tables are compared one after another. Memory is about 40 bytes for each older row, 17 after they are sorted,
    besides a chunk of rows. Vectors are in temporary files next to *folder*, mapped into memory.
    """
    written = dict[str, int]()
    with _write_new_folder(folder) as (complete, beside):
        if isinstance(since, int):
            with open_checkpoint_tables(checkpoint, beside, since=since) as newer:
                for name, (rows, width) in sorted(newer.rows.items()):
                    written[f"{name}.parquet"] = write_vectors_to_parquet(complete, name, width, rows)
                _write_dense_part(complete, newer, None, dict.fromkeys(newer.rows))
            return written
        counts = dict[str, int | None]()
        with (
            open_checkpoint_tables(checkpoint, beside) as newer,
            open_checkpoint_tables(since, beside) as older,
        ):
            for name in sorted({*newer.rows, *older.rows}):
                nothing: Rows = iter(()), (newer.rows.get(name) or older.rows[name])[1]
                (rows, width), (older_rows, older_width) = newer.rows.get(name, nothing), older.rows.get(name, nothing)
                if width != older_width:
                    raise SetupError(
                        f"table {name!r} has rows of {width} numbers in {str(checkpoint)!r} and of {older_width} in"
                        f" {str(since)!r}, expected the same number. Export all rows of the newer checkpoint instead"
                    )
                with tempfile.TemporaryFile(dir=beside) as file:
                    table = _OlderTable(name, older_rows, width, file)
                    changed = table.iterate_changed_rows(rows)
                    written[f"{name}.parquet"] = write_vectors_to_parquet(complete, name, width, changed)
                removed = pa.table({"id": table.ids[~table.seen]})
                written[f"{name}.removed.parquet"] = len(removed)
                pq.write_table(removed, complete / f"{name}.removed.parquet")
                counts[name] = table.newer_count if name in newer.rows else None
            _write_dense_part(complete, newer, older.step, counts)
    return written


def apply_row_diff(export: str | Path, diff: str | Path, folder: str | Path) -> dict[str, int]:
    """Write the export of a newer checkpoint from that of an older one, and return the number of rows in each file.

    The rows are those that :func:`~lightning_pipe.recsys.serving.table_files.write_tables_to_parquet` writes for the
    newer checkpoint, with the changed ones last. Memory is about 8 bytes for each changed row, besides a chunk.

    Args:
        export: folder that ``write_tables_to_parquet`` or this function wrote for the older checkpoint.
        diff: folder that :func:`write_row_diff` wrote for both checkpoints.
        folder: path of a new folder.
    """
    written = dict[str, int]()
    try:
        step = json.loads(Path(export, EXPORT).read_text())["step"]
        description = json.loads(Path(diff, _DIFF).read_text())
        tables = dict[str, int | None](description["tables"])
        if step is None or description["since_step"] != step:
            raise SetupError(
                f"expected changes since step {step} of the export {str(export)!r}, got those since"
                f" {description['since_step']} in {str(diff)!r}. Apply differences of two checkpoints in their order"
            )
        if unknown := {file.stem for file in Path(export).glob("*.parquet")} - tables.keys():
            raise SetupError(
                f"the export {str(export)!r} has tables that {str(diff)!r} lacks: {', '.join(sorted(unknown))}. Use"
                " folders of one model"
            )
        with _write_new_folder(folder) as (complete, _):
            for name, count in tables.items():
                if count is None:
                    continue
                written[f"{name}.parquet"] = _apply_to_table(Path(export), Path(diff), complete, name)
                if written[f"{name}.parquet"] != count:
                    raise SetupError(
                        f"table {name!r} would have {written[f'{name}.parquet']} rows, expected {count}:"
                        f" {str(diff)!r} was not made since the checkpoint of {str(export)!r}. Use that one"
                    )
            (complete / EXPORT).write_text(json.dumps({"step": description["step"]}) + "\n")
    except (OSError, LookupError, TypeError, ValueError, pa.ArrowException) as error:
        raise SetupError(
            f"the changes {str(diff)!r} cannot be applied to the export {str(export)!r}: {error}. Use complete folders"
        ) from error
    return written


def _apply_to_table(export: Path, diff: Path, folder: Path, name: str) -> int:
    """Write the older rows that did not change, then the changed rows, and return their number."""
    file, count = f"{name}.parquet", 0
    if Path(file).name != file:
        raise ValueError(f"expected the name of a table, got {name!r}")
    changes = pq.ParquetFile(diff / file)
    replaced = (changes.read(["id"])["id"], pq.read_table(diff / f"{name}.removed.parquet")["id"])
    replaced_ids = np.sort(np.concatenate([ids.to_numpy() for ids in replaced]))
    with pq.ParquetWriter(folder / file, changes.schema_arrow) as writer:
        if (export / file).exists():
            for rows in pq.ParquetFile(export / file).iter_batches():
                first, last = _search_sorted(replaced_ids, rows["id"].to_numpy())
                writer.write_batch(kept := rows.filter(pa.array(first == last)))
                count += len(kept)
        for rows in changes.iter_batches():
            writer.write_batch(rows)
            count += len(rows)
    return count


def _search_sorted(sorted_ids: Any, ids: Any) -> tuple[Any, Any]:
    """First place of each id and the place after its last, which are equal for an id that is not there."""
    return np.searchsorted(sorted_ids, ids, "left"), np.searchsorted(sorted_ids, ids, "right")


@contextmanager
def _write_new_folder(folder: str | Path) -> Iterator[tuple[Path, Path]]:
    """Folder to write, which gets its name after the block, and a folder for temporary files."""
    target = Path(folder)
    if os.path.lexists(target):
        raise SetupError(f"expected the path of a new folder, but {str(folder)!r} exists. Give another, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as beside:
        complete = Path(beside, "complete")
        complete.mkdir()
        yield complete, Path(beside)
        complete.rename(target)


def _write_dense_part(
    folder: Path, newer: CheckpointTables, since_step: int | None, counts: Mapping[str, int | None]
) -> None:
    """Write the values that are no rows, and the description of the difference."""
    torch.save(newer.dense, folder / "dense.pt")
    description = {"since_step": since_step, "step": newer.step, "tables": counts}
    (folder / _DIFF).write_text(json.dumps(description, indent=1) + "\n")


class _OlderTable:
    """Older rows of a table: sorted ids in memory, vectors in a file, and which ids the newer checkpoint has."""

    def __init__(self, name: str, rows: Iterator[tuple[Tensor, Tensor]], width: int, file: Any) -> None:
        parts = [np.empty(0, np.int64)]
        for ids, vectors in rows:
            parts.append(ids.numpy())
            file.write(_view_as_uint32(vectors))
        unsorted_ids = np.concatenate(parts)
        self._places = unsorted_ids.argsort(kind="stable")
        self.ids, self.seen = unsorted_ids[self._places], np.zeros(len(unsorted_ids), np.bool_)
        self.newer_count = 0
        if (self.ids[1:] == self.ids[:-1]).any():
            raise SetupError(f"the older checkpoint has rows of the same id in table {name!r}. Use another checkpoint")
        self._vectors = np.empty((0, width), np.uint32)
        if len(self.ids):  # an empty file cannot be mapped
            self._vectors = np.memmap(file, np.uint32, "r", shape=(len(self.ids), width))

    def iterate_changed_rows(self, rows: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        for ids, vectors in rows:
            self.newer_count += len(ids)
            first, last = _search_sorted(self.ids, ids.numpy())
            matched, changed = np.flatnonzero(first < last), np.ones(len(first), np.bool_)
            self.seen[first[matched]] = True
            older = self._vectors[self._places[first[matched]]]
            changed[matched] = (older != _view_as_uint32(vectors)[matched]).any(1)
            if changed.any():
                yield ids[changed], vectors[changed]


def _view_as_uint32(vectors: Tensor) -> Any:
    return vectors.float().numpy().view(np.uint32)
