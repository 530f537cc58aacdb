"""litdata's loader: a run continues within an epoch and between epochs to the bit, and no epoch is lost or cut."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from litdata import StreamingDataLoader, StreamingDataset, optimize

from tests.data.reading_cases import COLLATE, check, seen_by_runs
from tests.distributed import run_ranks

ROWS, BATCH = 96, 8


def row(index: int) -> dict[str, Any]:
    source = np.random.default_rng(index)
    genres = source.integers(0, 30, source.integers(0, 4))
    return {"user": index, "genres": genres, "age": float(source.random()), "label": index % 2}


@pytest.fixture(scope="module")
def chunks(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("rows"))
    optimize(row, list(range(ROWS)), folder, chunk_size=BATCH, num_workers=1)
    return folder


def read(chunks: str, workers: int, shuffle: bool, rank: int, ranks: int) -> Any:
    dataset = StreamingDataset(chunks, shuffle=shuffle, drop_last=True, seed=1)
    return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, collate_fn=COLLATE)


@pytest.mark.parametrize(("ranks", "workers", "shuffle"), [(1, 0, False), (1, 0, True), (2, 2, True)])
def test_a_run_continues_from_each_checkpoint_to_the_bit(
    chunks: str, tmp_path: Path, ranks: int, workers: int, shuffle: bool
) -> None:
    every = {1: 3, 2: 2, 3: 1}[ranks]  # one is written between the epochs, too
    first, second = check(
        run_ranks(seen_by_runs, ranks, partial(read, chunks, workers, shuffle), ROWS, every, tmp_path), ROWS
    )
    assert (first != second) == shuffle
