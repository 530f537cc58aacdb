"""The rows of a module on disk: what they cost where all of them are looked at."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.cache.initial_values import InitialValues
from lightning_pipe.recsys.dynamic.cache.row_cache import RowCache
from lightning_pipe.recsys.dynamic.cache.row_headers import BYTES
from lightning_pipe.recsys.dynamic.store import rocksdb_store
from lightning_pipe.recsys.dynamic.store.rocksdb_store import RocksDbStore
from lightning_pipe.recsys.dynamic.store.row_levels import SharedStore, StoredTable
from lightning_pipe.recsys.dynamic.tables.row_tables import RowTables
from tests.scenarios.faults.forked_ranks import Here, Nursery, told
from tests.scenarios.fuzzing.bounded import Outcome, open_bounded

NUMBERS = 256
WIDTH = BYTES + 4 * NUMBERS
CHUNK = rocksdb_store._SCAN_BYTES // WIDTH


def open_store(folder: Path) -> RocksDbStore:
    # Buffers of its own that are small beside a chunk of a scan.
    return RocksDbStore(folder, {"t": WIDTH}, readers=1, write_buffer=2**20, block_cache=2**20)


def row_tables(store: RocksDbStore) -> RowTables:
    weights = torch.zeros(4, NUMBERS)
    values = InitialValues("t", NUMBERS, lambda ids: torch.zeros(len(ids), NUMBERS))
    shared = SharedStore(store)
    cache = RowCache("t", [weights], StoredTable(shared, "t"), initial=values, state_fill=[])
    alone: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return RowTables({"t": cache}, ["t"], store=shared, group=alone, description={}, existing="forget")


def forget(folder: Path) -> None:
    store = open_store(folder)
    store.settle(store.state.committed)
    tables = row_tables(store)
    tables.forget()
    assert store.count("t") == 0
    store.close()


def forget_measured(here: Here, folder: str) -> Outcome:
    return open_bounded(forget, Path(folder))


def fill(folder: Path, rows: int) -> Path:
    store = open_store(folder)
    store.settle(0)
    for keys in np.array_split(np.arange(rows), 32):
        store.write("t", keys, np.zeros((len(keys), WIDTH), np.uint8))
    store.prepare(1)
    store.commit(1)
    store.close()
    return folder


@pytest.mark.exhaustive
def test_rows_are_forgotten_some_at_a_time(ranks: Nursery, tmp_path: Path) -> None:
    used = []
    for rows in (4 * CHUNK, 32 * CHUNK):
        # In a process without the engine's threads, which a fork would lose.
        (ended,) = ranks.run(forget_measured, 1, str(fill(tmp_path / str(rows), rows)))
        assert ended.code == 0, told([ended])
        outcome: Outcome = ended.value
        outcome.check()
        used.append(outcome.memory)
    # Once it has seen some chunks it needs no more: only what the engine keeps of erased keys, and the allocator loses.
    assert used[1] - used[0] < 4 * rocksdb_store._SCAN_BYTES


@pytest.mark.parametrize(
    "progress",
    [
        {"step": "soon"},
        {"step": "-1"},
        {"step": "9" * 40},
        {"seed": "x"},
        {"optimizer_steps": "1"},
        {"step": None},
        [1],
    ],
)
def test_progress_that_is_none_is_refused_with_what_was_found(progress: Any, tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    store.settle(0)
    tables = row_tables(store)
    with pytest.raises(SetupError, match=r"the rows of t were written with the progress .*; expected step, seed and"):
        tables._set_progress(progress)
    tables._set_progress({"step": "7", "seed": "-3", "optimizer_steps": ""})
    assert tables.step == 7
    store.close()
