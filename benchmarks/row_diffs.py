"""Size and time of the difference of two checkpoints, relative to an export of all rows.

``OMP_NUM_THREADS=1 python -m benchmarks.row_diffs`` writes a checkpoint with ``--tables`` tables of ``--rows`` rows,
and newer ones in which a part of the rows, drawn at random, has other values. For each part it writes the export of the
newer checkpoint and the difference, applies the difference to the older export, and applies it in the example of a
server. Spreads are the quartiles over ``--rounds`` rounds.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.figures import Figure, add_options, quartiles, save
from examples.serving.server import Deltas
from lightning_pipe.checkpoints.folder_writing import META
from lightning_pipe.recsys.serving.row_diff import apply_row_diff, write_row_diff
from lightning_pipe.recsys.serving.table_files import write_tables_to_parquet

PARTS = (0.01, 0.1, 1.0)


def main() -> None:
    """Measure the differences."""
    parser = argparse.ArgumentParser(description="differences of checkpoints")
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of a table")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    for part in PARTS:
        with tempfile.TemporaryDirectory() as folder:
            figures += _measure(Path(folder), part, options)
    save(figures, options.json)


def _measure(folder: Path, part: float, options: argparse.Namespace) -> list[Figure]:
    generator = torch.Generator().manual_seed(1)
    values = {
        f"tables.embedding_bags.table{number}.weight": torch.rand(options.rows, options.dim, generator=generator)
        for number in range(options.tables)
    }
    _write_checkpoint(folder / "older", values, 1)
    served = {name: value.clone() for name, value in values.items()}
    for value in values.values():
        value[torch.randperm(len(value), generator=generator)[: round(part * len(value))]] += 1
    _write_checkpoint(folder / "newer", values, 2)
    write_tables_to_parquet(folder / "older", folder / "export")
    form = {"step": 1, "state_dict": sorted(values)}
    work: dict[str, Callable[[], Any]] = {
        "export": lambda: write_tables_to_parquet(folder / "newer", folder / "made/export"),
        "diff": lambda: write_row_diff(folder / "newer", folder / "older", folder / "made/deltas/diff"),
        "apply": lambda: apply_row_diff(folder / "export", folder / "made/deltas/diff", folder / "made/applied"),
        "server": lambda: Deltas(str(folder / "made/deltas"), served, form, logging.getLogger()).newest().__enter__(),
    }
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(options.rounds):
        shutil.rmtree(folder / "made", ignore_errors=True)
        for name, run in work.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    size, whole = (_size(folder / "made" / name) for name in ("deltas", "export"))
    print(f"{part:.0%} of rows changed: {size / 1e6:.1f} MB, {size / whole:.3f} of {whole / 1e6:.1f} MB;", end="")
    print("".join(f" {name} {statistics.median(found):.2f} s" for name, found in times.items()))
    assert all(torch.equal(served[name], value) for name, value in values.items())
    name = f"{part:.0%} of rows changed"
    ratios = [diff / export for diff, export in zip(times["diff"], times["export"], strict=True)]
    return [
        Figure(f"row diff, {name}: size / size of an export", size / whole, "ratio", (size / whole, size / whole)),
        Figure(f"row diff, {name}: time / time of an export", statistics.median(ratios), "ratio", quartiles(ratios)),
    ]


def _write_checkpoint(folder: Path, values: dict[str, Tensor], step: int) -> None:
    with warnings.catch_warnings(action="ignore"):  # that there is one rank
        dcp.save({"model": values}, checkpoint_id=folder)
    torch.save({"global_step": step}, folder / META)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    main()
