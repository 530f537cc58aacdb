"""A rank that never arrives, or is gone before there is a group: the others end in time."""

from __future__ import annotations

import os
import re
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.scenarios.faults.forked_ranks import Ended, Here, Nursery, told
from tests.scenarios.faults.training import BOUND, fit, module

pytestmark = pytest.mark.exhaustive

# How long (seconds) ranks wait for each other: those that are there must arrive within it on a busy machine as well.
WAIT = 20


def waiting(here: Here) -> None:
    fit("pipeline", here.world_size, module("pipeline"), strategy={"timeout": timedelta(seconds=WAIT)})


@pytest.fixture(scope="module")
def ended(ranks: Nursery) -> list[Ended]:
    """Two ranks of three."""
    return ranks.run(waiting, 3, absent=1)


def test_the_others_end_in_time(ended: list[Ended]) -> None:
    assert [one.code for one in ended] == [1, 1], told(ended)
    assert max(one.seconds for one in ended) < WAIT + BOUND, told(ended)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_says_who_is_missing(rank: int, ended: list[Ended]) -> None:
    assert re.search(r"SetupError: rank\(s\) 2 of 3 did not arrive in 20 s", str(ended[rank].value)), told(ended)


def killed_before_the_group_is_made(here: Here) -> None:
    if here.rank == 1:
        dist.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    waiting(here)


def test_a_rank_that_is_killed_after_all_have_arrived_is_waited_for_as_long(ranks: Nursery) -> None:
    ended = ranks.run(killed_before_the_group_is_made, 2)
    assert [one.code for one in ended] == [1, -signal.SIGKILL], told(ended)
    assert ended[0].seconds < WAIT + BOUND, told(ended)
    assert ended[0].value.kind == "DistStoreError", told(ended)
