"""A store whose reads wait."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lightning_pipe.recsys.dynamic.rocksdb_store import RocksDbStore
from lightning_pipe.recsys.dynamic.row_store import RunPart
from lightning_pipe.recsys.dynamic.slow_store import SlowStore


def test_reads_wait_by_read_and_by_record_and_nothing_else_does(tmp_path: Path) -> None:
    waits: list[float] = []
    store = SlowStore(RocksDbStore(tmp_path / "rows", {"a": 3}), per_read=0.5, per_record=0.25, wait=waits.append)
    store.join(RunPart("run", 0, 1))
    store.settle(0)
    keys = np.array([4, 5, 6])
    records = np.arange(9, dtype=np.uint8).reshape(3, 3)
    store.write("a", keys, records)
    store.erase("a", keys[1:2])
    store.prepare(1, {"step": "1"})
    store.commit(1)
    assert (store.state.committed, store.notes(), store.count("a")) == (1, {"step": "1"}, 2)
    assert [scanned.tolist() for scanned, _ in store.scan("a")] == [[4, 6]]
    assert waits == []
    read, found = store.read("a", keys)
    assert found.tolist() == [True, False, True]
    np.testing.assert_array_equal(read[found], records[found])
    assert waits == [pytest.approx(1.25)]
    store.read("a", keys[:0])
    assert len(waits) == 1
    store.close()
