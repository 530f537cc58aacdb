"""Time to collate a million ids with ``JaggedCollator``, from columns and from rows, and with a loop over rows.

``OMP_NUM_THREADS=1 python -m benchmarks.jagged_collator`` collates the same rows, with ``--columns`` lists of ids and
13 dense features each, in turns:

- *columns*: ``JaggedCollator`` on an Arrow record batch, as a reader of Parquet gives it;
- *rows*: ``JaggedCollator`` on a list of dicts, as a ``DataLoader`` gives the samples of a map-style dataset;
- *loop*: the same list, collated by appending each row's ids to the lists of its feature.

Aim: *columns* at most 10 ms per million ids on one core. The output is medians over rounds with quartiles; the ratio to
*loop* has the 95 % interval over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.figures import Figure, add_options, at_most, median_ratio, quartiles, save
from lightning_pipe.data import JaggedCollator

LIMIT = 10.0  # ms per million ids


def main() -> None:
    """Print the time of each way per million ids, and save the figures."""
    parser = argparse.ArgumentParser(description="collation of ids")
    parser.add_argument("--ids", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=12)
    add_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [f"feature{index}" for index in range(options.columns)]
    batch, rows = data(names, options.ids)
    collate = JaggedCollator(names, ["dense"])
    ways: dict[str, Callable[[], Any]] = {
        "columns": lambda: collate(batch),
        "rows": lambda: collate(rows),
        "loop": lambda: in_a_loop(names, rows),
    }
    expected = in_a_loop(names, rows).sparse_features
    for way in ("columns", "rows"):
        features = ways[way]().sparse_features
        if not (
            torch.equal(features.values(), expected.values()) and torch.equal(features.lengths(), expected.lengths())
        ):
            raise AssertionError(f"{way} gives other ids than the loop")
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds):
        for way, run in ways.items():
            begun = time.perf_counter()
            run()
            times[way].append((time.perf_counter() - begun) * 1e9 / expected.values().numel())  # ms per million ids
    values = {way: statistics.median(of_way) for way, of_way in times.items()}
    ratio, spread = median_ratio(times["columns"], times["loop"])
    figures = [
        at_most("collate a million ids, columns", values["columns"], LIMIT, quartiles(times["columns"]), "ms"),
        Figure("collate a million ids, rows", values["rows"], "ms", quartiles(times["rows"])),
        Figure("collate a million ids, loop", values["loop"], "ms", quartiles(times["loop"])),
        Figure("collate a million ids, columns / loop", ratio, "ratio", spread),
    ]
    for figure in figures:
        print(
            f"{figure.name:42} {figure.value:9.3f} {figure.unit:6} {figure.spread[0]:9.3f} .. {figure.spread[1]:9.3f}"
        )
    save(figures, options.json)


def data(names: Sequence[str], ids: int) -> tuple[pa.RecordBatch, list[dict[str, Any]]]:
    """The same rows as a record batch and as a list."""
    source = np.random.default_rng(0)
    size = ids // (5 * len(names))
    columns: dict[str, Any] = {}
    for name in names:
        ends = np.concatenate([[0], source.integers(0, 11, size).cumsum()])
        columns[name] = pa.ListArray.from_arrays(ends.astype(np.int32), source.integers(0, 10**9, ends[-1]))
    columns["dense"] = pa.FixedSizeListArray.from_arrays(source.random(size * 13, np.float32), 13)
    columns["label"] = source.integers(0, 2, size)
    batch = pa.RecordBatch.from_pydict(columns)
    return batch, batch.to_pylist()


def in_a_loop(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Batch:
    """Batch as a ``collate_fn`` of few lines makes it."""
    ids: list[int] = []
    lengths: list[int] = []
    for name in names:
        for row in rows:
            ids += row[name]
            lengths.append(len(row[name]))
    return Batch(
        torch.tensor([row["dense"] for row in rows]),
        KeyedJaggedTensor(list(names), torch.tensor(ids), lengths=torch.tensor(lengths, dtype=torch.int32)),
        torch.tensor([float(row["label"]) for row in rows]),
    )


if __name__ == "__main__":
    main()
