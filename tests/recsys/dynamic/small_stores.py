"""Small stores that tests fill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.store.rocksdb_store import RocksDbStore
from lightning_pipe.recsys.dynamic.store.row_store import Records

WIDTH = 40
EDGES = np.array([0, -1, 1, 2**63 - 1, -(2**63), 255, 256, -256, 2**40, -(2**40)])


def open_store(folder: Path, version: int | None = None, **options: Any) -> RocksDbStore:
    store = RocksDbStore(folder, {"a": WIDTH, "b": 8}, {"a": {"dimension": 9}}, **options)
    try:
        store.recover(store.current_state.committed if version is None else version)
    except SetupError:
        store.close()
        raise
    return store


def some_records(count: int, seed: int = 0, width: int = WIDTH) -> Records:
    return np.random.default_rng(seed).integers(0, 256, (count, width), dtype=np.uint8)


def commit(store: RocksDbStore, **notes: str) -> None:
    version = store.current_state.committed + 1
    store.prepare_commit(version, notes)
    store.commit(version)


def size(store: RocksDbStore, table: str) -> int:
    return sum(len(keys) for keys, _ in store.scan(table))
