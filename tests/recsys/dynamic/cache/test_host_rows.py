"""Records in host memory: what is read is what was written last, wherever it is, and no record is lost."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from lightning_pipe.recsys.dynamic.cache import host_rows
from lightning_pipe.recsys.dynamic.cache.host_rows import HostRows
from lightning_pipe.recsys.dynamic.store.buffered_store import Change, SharedStore
from lightning_pipe.recsys.dynamic.store.row_store import Keys, Records
from tests.patience import HANG
from tests.recsys.dynamic.memory_store import MemoryStore


def keys(*numbers: int) -> Keys:
    return np.array(numbers, np.int64)


def records(*values: int) -> Records:
    return np.repeat(np.array(values, np.uint8)[:, None], 2, axis=1)


class Levels:
    """A level of a few records over a store that has three."""

    def __init__(self, capacity: int = 4) -> None:
        self.store = MemoryStore({"t": 2})
        self.store.write("t", keys(1, 2, 3), records(1, 2, 3))
        self.shared = SharedStore(self.store)
        self.level = HostRows(capacity, 2, self.shared, "t")

    def read(self, *numbers: int) -> dict[int, int]:
        found, there = self.level.read(keys(*numbers))
        return {key: found[at, 0].item() for at, key in enumerate(numbers) if there[at]}

    def write(self, **values: int) -> None:
        numbers = [int(name[1:]) for name in values]
        self.level.write(keys(*numbers), records(*values.values()))

    def stored(self) -> dict[int, int]:
        return {key: record[0] for key, record in self.store.tables["t"].items()}

    def changes(self, *above: int) -> list[Change]:
        return list(self.level.copy_changes(keys(*above)))


def told(changes: list[Change]) -> dict[int, int]:
    assert not any(change.erased_keys.size for change in changes)
    return {
        key: value
        for change in changes
        for key, value in zip(change.keys.tolist(), change.records[:, 0].tolist(), strict=True)
    }


def test_the_store_is_read_once(way: str) -> None:
    levels = Levels()
    assert levels.read(1, 9, 3) == {1: 1, 3: 3}
    levels.store.failing.add("read")
    assert levels.read(3, 1) == {1: 1, 3: 3}
    with pytest.raises(OSError, match="read fails"):
        levels.read(1, 2)


def test_writes_stay_here_until_they_are_evicted_in_the_order_of_use(way: str) -> None:
    levels = Levels()
    levels.write(k1=10, k5=50)
    levels.read(2)
    levels.read(1, 7)
    levels.write(k6=60)
    assert levels.stored() == {1: 1, 2: 2, 3: 3}
    levels.write(k8=80)
    assert levels.stored() == {1: 1, 2: 2, 3: 3, 5: 50}
    assert levels.read(1, 2, 3, 5, 6, 8) == {1: 10, 2: 2, 3: 3, 5: 50, 6: 60, 8: 80}


def test_cleared_records_never_were(way: str) -> None:
    levels = Levels()
    levels.write(k1=10, k4=40)
    levels.level.clear_host_memory()
    assert levels.read(1, 4) == {1: 1}
    assert levels.changes() == []
    levels.write(k5=50, k6=60, k7=70)
    assert levels.read(1, 5, 6, 7) == {1: 1, 5: 50, 6: 60, 7: 70}


# ---------------------------------------------------------------------- commits


def test_changes_are_what_the_store_lacks_but_for_newer_ones_above(way: str) -> None:
    levels = Levels()
    levels.read(3)
    levels.write(k1=10, k4=40)
    changes = levels.changes(3, 4, 77)
    assert told(changes) == {1: 10}
    # The cache above writes its newer records past this level, and does not write them here again.
    levels.level.write_changes(Change(keys(3), records(33), erased_keys=keys(4)))
    for change in changes:
        levels.level.write_changes(change)
    levels.level.mark_stored()
    assert levels.stored() == {1: 10, 2: 2, 3: 33}
    assert levels.read(1, 3, 4) == {1: 10, 3: 33}
    assert levels.changes() == []


def test_records_written_after_they_were_copied_are_changes_again(way: str) -> None:
    levels = Levels()
    levels.write(k1=10, k2=20)
    assert told(levels.changes()) == {1: 10, 2: 20}
    changes = levels.changes()  # the first ones were not kept
    levels.write(k2=21)
    for change in changes:
        levels.level.write_changes(change)
    levels.level.mark_stored()
    assert levels.stored() == {1: 10, 2: 20, 3: 3}
    assert told(levels.changes()) == {2: 21}


def test_a_copied_record_that_is_evicted_before_it_is_kept_is_read_back(way: str) -> None:
    levels = Levels(capacity=1)
    levels.write(k1=10)
    changes = levels.changes()
    levels.shared.buffer_writes()
    levels.write(k1=11)
    levels.read(3)
    assert levels.read(1) == {1: 11}
    for change in changes:
        levels.level.write_changes(change)
    assert levels.stored()[1] == 10
    levels.level.mark_stored()
    levels.shared.flush_writes()
    assert levels.stored()[1] == levels.read(1)[1] == 11
    assert levels.changes() == []


# ---------------------------------------------------------------------- a level below that fails


def test_no_record_is_lost_if_an_eviction_fails(way: str) -> None:
    levels = Levels(capacity=2)
    levels.write(k4=40, k5=50)
    levels.store.failing.add("write")
    for call in (lambda: levels.write(k6=60), lambda: levels.read(1), lambda: list(levels.level.scan(9))):
        with pytest.raises(OSError, match="write fails"):
            call()
    assert levels.read(4, 5, 6) == {4: 40, 5: 50}
    levels.store.failing.clear()
    levels.write(k6=60)
    assert levels.read(1, 4, 5, 6) == {1: 1, 4: 40, 5: 50, 6: 60}


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_calls_is_a_dictionary_also_where_the_store_fails(
    seed: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_rows, "_CHUNK", 3)
    chance = random.Random(seed)
    levels = Levels(capacity=chance.choice([1, 2, 5, 12]))
    expected = {1: 1, 2: 2, 3: 3}
    for _ in range(300):
        levels.store.failing = {"write", "read", "erase"} if chance.random() < 0.15 else set()
        some = chance.sample([*range(14), -(2**63), 2**63 - 1], chance.randrange(1, 7))
        try:
            match chance.choice(["read", "read", "write", "write", "erase", "flush", "scan", "hold", "release"]):
                case "read":
                    assert levels.read(*some) == {key: expected[key] for key in some if key in expected}
                case "write":
                    values = {key: chance.randrange(256) for key in some}
                    # Until a failed write is repeated, either record may be there.
                    for _ in range(2):
                        try:
                            levels.level.write(keys(*values), records(*values.values()))
                            break
                        except OSError:
                            levels.store.failing = set()
                    expected.update(values)
                case "erase":
                    levels.level.erase(keys(*some))
                    for key in some:
                        expected.pop(key, None)
                case "flush":
                    levels.shared.flush_writes()
                    for change in levels.changes():
                        levels.level.write_changes(change)
                    levels.level.mark_stored()
                    assert levels.stored() == expected
                case "scan":
                    levels.shared.flush_writes()
                    found = [key for chunk, _ in levels.level.scan(5) for key in chunk.tolist()]
                    assert sorted(found) == sorted(expected)
                case "hold":
                    levels.shared.buffer_writes()
                case "release":
                    levels.shared.flush_writes()
        except OSError:
            pass
    levels.store.failing = set()
    assert levels.read(*expected) == expected


def test_threads_may_read_while_others_write_and_commit(way: str) -> None:
    levels = Levels(capacity=40)
    wrong: list[dict[int, int]] = []

    def use(first: int) -> None:
        source = random.Random(first)
        mine = dict.fromkeys(range(first, first + 60), 0)
        for turn in range(150):
            some = source.sample(sorted(mine), 10)
            levels.level.write(keys(*some), records(*[turn % 256] * len(some)))
            mine.update(dict.fromkeys(some, turn % 256))
            seen = source.sample(sorted(mine), 10)
            found = levels.read(*seen)
            if any(found.get(key, 0) != mine[key] for key in seen):
                wrong.append(found)

    threads = [threading.Thread(target=use, args=(first,)) for first in (100, 200)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        levels.level.mark_stored()
        list(levels.level.scan(1000))
    for thread in threads:
        thread.join(HANG)
    assert not wrong
