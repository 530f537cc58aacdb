"""Rows of Parquet files: each is read once an epoch by one rank, and a run continues within an epoch to the bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.recsys_criteo.parquet import ParquetBatches, loader
from tests.data.reading_cases import COLLATE, COLUMNS, check, seen_by_runs
from tests.distributed import run_ranks

FILES, GROUPS, ROWS = 3, 4, 20  # row groups of a file, and rows of a group


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, source = tmp_path_factory.mktemp("rows"), np.random.default_rng(0)
    size = GROUPS * ROWS
    for file in range(FILES):
        rows = {
            "user": np.arange(size) + file * size,
            "genres": [source.integers(0, 30, source.integers(0, 4)).tolist() for _ in range(size)],
            "age": source.random(size),
            "label": source.integers(0, 2, size),
        }
        pq.write_table(pa.table(rows), folder / f"{file}.parquet", row_group_size=ROWS)
    return sorted(folder.iterdir())


def read(files: list[Path], workers: int, rank: int, ranks: int) -> Any:
    return loader(ParquetBatches(files, COLUMNS, COLLATE, 8, rank, ranks), workers)


@pytest.mark.parametrize(("ranks", "workers"), [(2, 0), pytest.param(1, 2, marks=pytest.mark.exhaustive)])
def test_a_run_continues_within_an_epoch_to_the_bit(
    files: list[Path], tmp_path: Path, ranks: int, workers: int
) -> None:
    rows = FILES * GROUPS * ROWS
    first, second = check(run_ranks(seen_by_runs, ranks, partial(read, files, workers), rows, 7, tmp_path), rows)
    assert first != second  # another order in each epoch


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_that_is_left_is_followed_by_a_whole_one(files: list[Path], workers: int) -> None:
    rows = read(files, workers, 0, 1)
    left = next(iter(rows))
    users = [user for batch in rows for user in batch.sparse_features["user"].values().tolist()]
    assert sorted(users) == list(range(FILES * GROUPS * ROWS))
    assert left.sparse_features["user"].values().tolist() != users[:8]  # in another order
