"""A generator that is asked for its state often gives the same as one that is asked once, whatever happens between."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_pipe.loops.data.watched_generators import NUMPY, PYTHON, WatchedGenerator, _Numpy, _Python

PYTHONS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "getrandbits": lambda: random.getrandbits(32),
    "seed": lambda: random.seed(3),
    "nothing": lambda: None,
}
NUMPYS: dict[str, Callable[[], Any]] = {
    "rand": numpy.random.rand,
    "randn": numpy.random.randn,
    "many": lambda: numpy.random.rand(700),
    "permutation": lambda: numpy.random.permutation(5),
    "seed": lambda: numpy.random.seed(3),
    "nothing": lambda: None,
}


def python_state() -> Any:
    return random.getstate()


def numpy_state() -> Any:
    return plain(numpy.random.get_state())


def plain(state: Any) -> Any:
    return (state[0], state[1].tolist(), *state[2:]) if isinstance(state[1], numpy.ndarray) else state


KINDS: dict[str, tuple[type[WatchedGenerator], dict[str, Callable[[], Any]], Callable[[], Any]]] = {
    "python": (_Python, PYTHONS, python_state),
    "numpy": (_Numpy, NUMPYS, numpy_state),
}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150, deadline=None, database=None)
def test_the_state_is_the_generators_own_after_any_draws_and_settings(kind: str, data: st.DataObject) -> None:
    make, draws, own = KINDS[kind]
    draws["seed"]()
    watched = make()
    kept = [watched.get()]
    for step in data.draw(st.lists(st.sampled_from([*draws, "set", "swap", "get"]), max_size=25)):
        if step == "set":
            state = data.draw(st.sampled_from(kept))
            watched.set(state)
            assert own() == plain(state)
        elif step == "swap":
            state, before = data.draw(st.sampled_from(kept)), own()
            assert plain(watched.swap(state)) == before
            assert own() == plain(state)
        elif step == "get":
            kept.append(watched.get())
        else:
            draws[step]()
        assert plain(watched.get()) == own()


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_asked_only_where_something_was_drawn(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, draws, _ = KINDS[kind]
    draws["seed"]()
    watched = make()
    asked = []
    ask = watched._ask

    def counted() -> Any:
        asked.append(kind)
        return ask()

    monkeypatch.setattr(watched, "_ask", counted)
    first = watched.get()
    assert all(watched.get() is first for _ in range(3))
    assert len(asked) == 1
    next(iter(draws.values()))()
    assert watched.get() is not first
    assert len(asked) == 2
    watched.set(first)
    assert watched.get() is first
    assert len(asked) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_memory_that_is_not_what_the_state_says_is_not_believed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, draws, own = KINDS[kind]
    draws["seed"]()
    watched = make()
    monkeypatch.setattr(watched, "_peek", lambda: b"always the same")
    for _ in range(3):
        next(iter(draws.values()))()
        assert plain(watched.get()) == own()


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_look_at_its_memory_it_is_asked_every_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, draws, own = KINDS[kind]
    watched = make()
    monkeypatch.setattr(watched, "_peek", lambda: None)
    before = watched.get()
    next(iter(draws.values()))()
    assert plain(watched.get()) == own()
    watched.set(before)
    assert own() == plain(before)


def test_the_processes_own_are_watched() -> None:
    assert isinstance(PYTHON, _Python)
    assert isinstance(NUMPY, _Numpy)
