from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from lightning_pipe.loops.data.random_streams import (
    RandomStreams,
    Stream,
    get_rng_states,
    pack_rng_states,
    set_rng_states,
    swap_rng_states,
    unpack_rng_states,
)
from lightning_pipe.loops.data.resume import are_equal

CPU = torch.device("cpu")
SECOND: tuple[Stream, ...] = ("prepare", "transfer")


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.rand())


def seed(number: int = 5) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def test_the_model_draws_the_same_however_often_the_second_streams_are_used() -> None:
    drawn = []
    for uses in (1, 4):
        seed()
        streams = RandomStreams(CPU)
        streams.run_with_stream("fetch", draw)
        for _ in range(uses):
            streams.run_with_stream("fetch", draw)
        drawn.append(draw())
    assert drawn[0] == drawn[1]


def test_the_second_streams_draw_the_same_whatever_the_model_draws_between() -> None:
    drawn = []
    for between in (0, 3):
        seed()
        streams = RandomStreams(CPU)
        of_run = []
        for _ in range(3):
            of_run.append(streams.run_with_stream("fetch", draw))
            for _ in range(between):
                draw()
        drawn.append(of_run)
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 3


def test_the_first_block_of_an_epoch_uses_the_common_streams() -> None:
    seed()
    expected = [draw(), draw()]
    seed()
    streams = RandomStreams(CPU)
    first = streams.run_with_stream("fetch", draw)
    assert [first, draw()] == expected


def test_a_restart_takes_the_common_streams_up_again() -> None:
    seed()
    streams = RandomStreams(CPU)
    for _ in range(2):
        streams.run_with_stream("fetch", draw)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    streams.restart()
    streams.run_with_stream("fetch", lambda: None)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def test_the_models_streams_are_put_back_when_a_block_raises() -> None:
    seed()
    streams = RandomStreams(CPU)
    streams.run_with_stream("fetch", lambda: None)
    expected = torch.get_rng_state()

    def fail() -> None:
        draw()
        raise KeyError

    with pytest.raises(KeyError):
        streams.run_with_stream("fetch", fail)
    assert torch.equal(torch.get_rng_state(), expected)


def test_where_the_common_stream_was_is_remembered_until_somebody_forgets_it() -> None:
    seed()
    streams = RandomStreams(CPU)
    streams.run_with_stream("fetch", draw)
    draw()
    expected = torch.get_rng_state(), random.getstate()
    streams.run_with_stream("prepare", draw)
    assert streams.common is not None
    assert torch.equal(streams.common["torch"], expected[0])
    assert streams.common["python"] == expected[1]
    streams.common = None
    streams.run_with_stream("transfer", draw)
    assert streams.common is not None
    assert streams.common["python"] == expected[1]


def test_no_two_streams_draw_the_same_and_each_draws_what_the_seed_says() -> None:
    drawn = []
    for number in (5, 5, 6):
        seed(number)
        streams = RandomStreams(CPU)
        streams.run_with_stream("fetch", draw)
        # Each goes on from where it was, too.
        drawn.append([draw(), *(streams.run_with_stream(name, draw) for name in SECOND + SECOND)])
    assert drawn[0] == drawn[1]
    for of_library in zip(*drawn[0], *drawn[2], strict=True):
        assert len(set(of_library)) == 10


def test_states_come_back_from_a_checkpoint_with_the_normal_numbers_that_are_kept() -> None:
    def normal() -> tuple[float, float]:
        return random.gauss(0, 1), float(numpy.random.randn())

    seed()
    normal()  # which makes two, and keeps one
    packed = pack_rng_states(get_rng_states(CPU))
    expected = normal(), draw(), normal()
    seed(6)
    set_rng_states(unpack_rng_states(packed), CPU)
    assert are_equal(pack_rng_states(get_rng_states(CPU)), packed)
    assert (normal(), draw(), normal()) == expected


DRAWS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "rand": numpy.random.rand,
    "randn": numpy.random.randn,
    "two randn": lambda: numpy.random.randn(2),
    "many": lambda: numpy.random.rand(700),
    "seed": lambda: numpy.random.seed(3),
}


@pytest.mark.parametrize(
    ("before", "since"), [*((name, "nothing") for name in DRAWS), *(("randn", name) for name in DRAWS)]
)
def test_a_swap_returns_the_states_found_and_leaves_the_states_given(before: str, since: str) -> None:
    seed()
    DRAWS[before]()
    given = get_rng_states(CPU)
    DRAWS[since]()
    found = pack_rng_states(get_rng_states(CPU))
    assert are_equal(pack_rng_states(swap_rng_states(given, CPU)), found)
    assert are_equal(pack_rng_states(get_rng_states(CPU)), pack_rng_states(given))
