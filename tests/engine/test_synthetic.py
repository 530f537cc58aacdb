"""What synthetic graphs run for real takes what they say it does."""

from __future__ import annotations

import os
import time

import pytest

from tests.engine.synthetic import Cores, Kernel, Link
from tests.engine.within import Hang, within
from tests.patience import HANG


def test_a_kernel_works_until_it_has_had_a_core_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now, cost = [0.0], [1e-7]
    monkeypatch.setattr(time, "thread_time", lambda: now[0])

    def run(rounds: int) -> None:
        now[0] += rounds * cost[0]

    monkeypatch.setattr(Kernel, "_run", staticmethod(run))
    kernel = Kernel()
    for seconds in (0.0, 3e-3, 8e-3):
        # The core that was timed has become faster, or slower.
        for cost[0] in (0.5e-7, 1e-7, 1.9e-7):
            begin = now[0]
            kernel(seconds)
            assert now[0] - begin == pytest.approx(seconds, abs=40e-6)


def test_a_kernel_takes_the_time_of_its_own_thread() -> None:
    begin = time.thread_time()
    Kernel()(3e-3)
    assert time.thread_time() - begin >= 0.95 * 3e-3


def test_users_of_a_link_share_it_fairly(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    link = Link()

    def done_at(moment: float, work: float, patience: float = HANG) -> None:
        now[0] = moment
        within(patience, lambda: link.wait(work))

    long, short = link.begin(5.0), link.begin(2.0)
    now[0] = 2.0
    third = link.begin(1.0)
    # Half of it for 2 seconds, then a third: 1 is left of the short one, 1 of the third, 4 of the long one.
    for moment, work in ((4.8, short), (4.9, third)):
        with pytest.raises(Hang):
            done_at(moment, work, 0.1)
    done_at(5.0, short)
    done_at(5.0, third)
    with pytest.raises(Hang):
        done_at(7.9, long, 0.1)
    done_at(8.0, long)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no say in where threads run")
def test_computing_keeps_to_so_many_cores() -> None:
    every = os.sched_getaffinity(0)
    for count in (1, len(every), len(every) + 1):
        with Cores(count).used():
            assert len(os.sched_getaffinity(0)) == min(count, len(every))
        assert os.sched_getaffinity(0) == every
