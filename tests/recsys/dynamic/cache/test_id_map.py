"""A map of ids to slots is a dictionary, with the compiled library and without."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.cache.id_map import LAST_TICK, id_map

# A few that meet often, the ends of the range, and what a small table's places depend on.
KEYS = st.one_of(st.integers(-8, 8), st.sampled_from([-(2**63), 2**63 - 1]), st.integers(-(2**63), 2**63 - 1))
CAPACITY = 12
CALLS = st.lists(
    st.tuples(st.sampled_from(["touch", "insert", "remove", "clear", "find"]), st.lists(KEYS, max_size=20))
)
BOTH_WAYS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=100)


def _keys(keys: list[int]) -> np.ndarray:
    return np.array(keys, np.int64)


@given(CALLS)
@BOTH_WAYS
def test_it_is_a_dictionary(way: str, calls: list[tuple[str, list[int]]]) -> None:
    table, slots, ticks = id_map(CAPACITY), dict[int, int](), dict[int, int]()
    for tick, (call, keys) in enumerate(calls, start=1):
        if call == "insert":
            new = [key for key in dict.fromkeys(keys) if key not in slots]
            free = [slot for slot in range(CAPACITY) if slot not in slots.values()]
            given_slots = dict(zip(new, free, strict=False))
            table.insert(_keys(list(given_slots)), _keys(list(given_slots.values())), tick)
            slots.update(given_slots)
            ticks.update(dict.fromkeys(given_slots.values(), tick))
        elif call == "remove":
            gone = [key for key in dict.fromkeys(keys) if key in slots]
            table.remove(_keys([slots[key] for key in gone]))
            for key in gone:
                del ticks[slots.pop(key)]
        elif call == "clear" and len(keys) < 3:
            table.clear()
            slots.clear()
            ticks.clear()
        elif call == "touch":
            found, touched, missing = table.touch(_keys(keys), tick)
            assert found.tolist() == [slots.get(key, -1) for key in keys]
            distinct_slots = list(dict.fromkeys(slots[key] for key in keys if key in slots))
            assert sorted(touched.tolist()) == sorted(distinct_slots)
            assert missing.tolist() == [at for at, key in enumerate(keys) if key not in slots]
            ticks.update(dict.fromkeys(touched.tolist(), tick))
        assert table.find(_keys(keys)).tolist() == [slots.get(key, -1) for key in keys]
        assert len(table) == len(slots)
        assert table.ticks().tolist() == [ticks.get(slot, 0) for slot in range(CAPACITY)]
        held = _keys(list(slots.values()))
        assert table.keys_of(held).tolist() == list(slots)


def test_a_full_map_that_loses_and_gains_ids_for_long_finds_them_all(way: str) -> None:
    source = np.random.default_rng(0)
    capacity = 1000
    table, held = id_map(capacity), np.arange(capacity) * 2**40
    table.insert(held, np.arange(capacity))
    for turn in range(1, 60):
        slots = source.permutation(capacity)[:300]
        gone = held[slots].copy()
        table.remove(slots)
        held[slots] = np.arange(300) + turn * 10**6
        table.insert(held[slots], slots)
        assert (table.find(gone) == -1).all()
        assert (table.find(held) == np.arange(capacity)).all()
    assert len(table) == capacity


def test_ticks_start_over(way: str) -> None:
    table = id_map(2)
    table.insert(_keys([5, 6]), _keys([0, 1]), LAST_TICK - 1)
    table.touch(_keys([5]), LAST_TICK)
    assert table.ticks().tolist() == [LAST_TICK, LAST_TICK - 1]
    table.reset_ticks()
    assert table.ticks().tolist() == [0, 0]
    assert table.touch(_keys([6, 6]), 1)[1].tolist() == [1]


@pytest.mark.parametrize("capacity", [0, -1, 2**31])
def test_a_capacity_that_cannot_be_is_refused(capacity: int) -> None:
    with pytest.raises(SetupError, match="slots; expected 1 to 2147483647"):
        id_map(capacity)
