"""Writes that are held back: reads see them, the store does not until they are let through."""

from __future__ import annotations

import numpy as np
import pytest

from lightning_pipe.recsys.dynamic.store import buffered_store
from lightning_pipe.recsys.dynamic.store.buffered_store import Change, SharedStore, TableStore
from lightning_pipe.recsys.dynamic.store.row_store import Keys, Records
from tests.recsys.dynamic.memory_store import MemoryStore


def keys(*numbers: int) -> Keys:
    return np.array(numbers, np.int64)


def records(*values: int) -> Records:
    return np.repeat(np.array(values, np.uint8)[:, None], 2, axis=1)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore({"a": 2, "b": 2})
    store.write("a", keys(1, 2, 3), records(1, 2, 3))
    return store


def seen(shared: SharedStore, table: str = "a") -> dict[int, int]:
    """What reads find of six keys."""
    found, there = TableStore(shared, table).read(keys(1, 2, 3, 4, -5, 6))
    return {key: found[at, 0].item() for at, key in enumerate((1, 2, 3, 4, -5, 6)) if there[at]}


def stored(store: MemoryStore, table: str = "a") -> dict[int, int]:
    return {key: record[0] for key, record in store.tables[table].items()}


def test_held_writes_are_read_and_not_stored_until_they_are_released(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffered_store, "_CHUNK", 1)
    shared = SharedStore(store)
    shared.buffer_writes()
    TableStore(shared, "a").write(keys(2, -5), records(20, 50))
    TableStore(shared, "a").erase(keys(3, 6))
    TableStore(shared, "b").write(keys(1), records(9))
    TableStore(shared, "a").erase(keys(2))
    TableStore(shared, "a").write(keys(2), records(21))
    after = {1: 1, 2: 21, -5: 50}
    assert (seen(shared), stored(store)) == (after, {1: 1, 2: 2, 3: 3})
    shared.flush_writes()
    assert (seen(shared), stored(store)) == (after, after)
    assert stored(store, "b") == {1: 9}
    TableStore(shared, "a").write(keys(1), records(10))
    assert stored(store)[1] == 10


def test_a_change_is_kept_while_later_writes_of_the_same_rows_are_held(store: MemoryStore) -> None:
    shared = SharedStore(store)
    table = TableStore(shared, "a")
    shared.buffer_writes()
    table.write(keys(2, 3), records(200, 201))
    table.write_changes(Change(keys(1, 2), records(100, 101), erased_keys=keys(3)))
    assert stored(store) == {1: 100, 2: 101}
    assert seen(shared) == {1: 100, 2: 200, 3: 201}
    shared.flush_writes()
    assert stored(store) == {1: 100, 2: 200, 3: 201}


def test_a_scan_does_not_see_held_writes(store: MemoryStore) -> None:
    shared = SharedStore(store)
    shared.buffer_writes()
    TableStore(shared, "a").write(keys(4), records(4))
    assert [chunk[0].tolist() for chunk in TableStore(shared, "a").scan(2)] == [[1, 2], [3]]


def test_writes_that_cannot_be_released_stay_readable_and_are_released_later(store: MemoryStore) -> None:
    shared = SharedStore(store)
    shared.buffer_writes()
    TableStore(shared, "a").write(keys(4), records(4))
    store.failing.add("write")
    with pytest.raises(OSError, match="write fails"):
        shared.flush_writes()
    with pytest.raises(OSError, match="write fails"):
        shared.buffer_writes()
    assert seen(shared)[4] == 4
    store.failing.clear()
    shared.buffer_writes()
    assert stored(store)[4] == 4


def test_dropped_writes_never_happened(store: MemoryStore) -> None:
    shared = SharedStore(store)
    shared.buffer_writes()
    TableStore(shared, "a").write(keys(1, 4), records(10, 4))
    shared.discard_writes()
    shared.flush_writes()
    assert seen(shared) == stored(store) == {1: 1, 2: 2, 3: 3}
