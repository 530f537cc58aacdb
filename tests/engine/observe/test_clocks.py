"""How the clocks of two ranks are compared: over a group whose messages take as long as a test says."""

from __future__ import annotations

import time
from collections import deque
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_pipe.engine.observe.clocks import ClockOffset, make_clock_converter, measure_offset

BEHIND = 5000.0  # seconds that rank 1's clock is behind rank 0's


class Link:
    """What rank 0 sees of a rank 1 that answers at once; each message takes its own time."""

    def __init__(self, there: list[float], back: list[float], behind: float = BEHIND) -> None:
        self.now = 9000.0
        self.behind = behind
        self.there, self.back = deque(there), deque(back)
        self.answer = 0.0
        self.sent: list[list[float]] = []

    def send(self, tensor: torch.Tensor, **_: Any) -> None:
        self.sent.append(tensor.tolist())
        if tensor.numel() == 1:
            self.now += self.there.popleft()
            self.answer = self.now - self.behind

    def recv(self, tensor: torch.Tensor, **_: Any) -> None:
        if tensor.numel() == 3:
            self.now += self.back.popleft()
            tensor[0] = self.answer


def offset_found(link: Link) -> ClockOffset:
    """What rank 0 tells rank 1."""
    with (
        mock.patch.multiple(dist, send=link.send, recv=link.recv),
        mock.patch.object(dist, "get_rank", return_value=0),
        mock.patch.object(dist, "get_world_size", return_value=2),
        mock.patch.object(time, "perf_counter", side_effect=lambda: link.now),
    ):
        group: Any = "group"
        assert measure_offset(group).seconds == 0.0
    return ClockOffset(*link.sent[-1])


def test_the_shortest_round_trip_says_how_far_a_clock_is_behind() -> None:
    found = offset_found(Link(there=[0.5] * 4 + [0.001] + [0.5] * 5, back=[0.1] * 4 + [0.001] + [0.1] * 5))
    assert found.seconds == pytest.approx(BEHIND)
    assert found.error == pytest.approx(0.001)


@pytest.mark.parametrize(("there", "back"), [(0.2, 0.001), (0.001, 0.2), (0.1, 0.1)])
def test_ranks_of_one_machine_have_one_clock_however_long_messages_take(there: float, back: float) -> None:
    found = offset_found(Link([there] * 10, [back] * 10, behind=0.0))
    assert (found.seconds, found.error) == (0.0, 0.0)


def test_a_clock_that_drifts_off_is_put_right_between_two_measurements() -> None:
    clock = make_clock_converter(ClockOffset(100.0, 7.0, 0.0), ClockOffset(200.0, 8.0, 0.0))
    assert [clock(moment) for moment in (100.0, 150.0, 200.0)] == pytest.approx([107.0, 157.5, 208.0])


def test_a_rank_that_is_alone_asks_nobody() -> None:
    found = measure_offset(None)
    assert (found.seconds, found.error) == (0.0, 0.0)
