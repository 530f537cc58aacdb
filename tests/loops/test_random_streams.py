from __future__ import annotations

import random

import numpy
import pytest
import torch

from lightning_pipe.loops.random_streams import RandomStreams

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(numpy.random.rand())


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)


def test_the_model_draws_the_same_however_often_the_second_streams_are_used() -> None:
    drawn = []
    for uses in (1, 4):
        seed()
        streams = RandomStreams(CPU)
        streams.draw("fetch", draw)
        for _ in range(uses):
            streams.draw("fetch", draw)
        drawn.append(draw())
    assert drawn[0] == drawn[1]


def test_the_second_streams_draw_the_same_whatever_the_model_draws_between() -> None:
    drawn = []
    for between in (0, 3):
        seed()
        streams = RandomStreams(CPU)
        of_run = []
        for _ in range(3):
            of_run.append(streams.draw("fetch", draw))
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
    first = streams.draw("fetch", draw)
    assert [first, draw()] == expected


def test_a_restart_takes_the_common_streams_up_again() -> None:
    seed()
    streams = RandomStreams(CPU)
    for _ in range(2):
        streams.draw("fetch", draw)
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    streams.restart()
    streams.draw("fetch", lambda: None)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def test_the_models_streams_are_put_back_when_a_block_raises() -> None:
    seed()
    streams = RandomStreams(CPU)
    streams.draw("fetch", lambda: None)
    expected = torch.get_rng_state()

    def fail() -> None:
        draw()
        raise KeyError

    with pytest.raises(KeyError):
        streams.draw("fetch", fail)
    assert torch.equal(torch.get_rng_state(), expected)


def test_where_the_common_stream_was_is_remembered_until_somebody_forgets_it() -> None:
    seed()
    streams = RandomStreams(CPU)
    streams.draw("fetch", draw)
    draw()
    expected = torch.get_rng_state(), random.getstate()
    streams.draw("prepare", draw)
    assert streams.common is not None
    assert torch.equal(streams.common["torch"], expected[0])
    assert streams.common["python"] == expected[1]
    streams.common = None
    streams.draw("transfer", draw)
    assert streams.common is not None
    assert streams.common["python"] == expected[1]
