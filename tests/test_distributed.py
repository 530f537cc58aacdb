"""The harness of the tests with several processes tells what went wrong on each rank, and never hangs itself."""

from __future__ import annotations

import atexit
import os
import re
import signal
import threading
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import END, THREADS, _Rank, run_ranks, threads_left


def report(rank: int, world_size: int, tensor: torch.Tensor) -> dict[str, object]:
    ranks = torch.tensor(float(rank))
    dist.all_reduce(ranks)
    tensor += rank  # each rank's own copy
    dist.barrier()
    return {
        "rank": rank,
        "sum": ranks,
        "tensor": tensor,
        "threads": torch.get_num_threads(),
        "environment": (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"]),
    }


def test_values_come_in_rank_order_and_each_rank_has_arguments_of_its_own() -> None:
    tensor = torch.zeros(3)
    values = run_ranks(report, 2, tensor)
    assert [value["rank"] for value in values] == [0, 1]
    assert [value["sum"] for value in values] == [torch.tensor(1.0)] * 2
    assert [value["tensor"].tolist() for value in values] == [[0.0] * 3, [1.0] * 3]  # type: ignore[attr-defined]
    assert [value["threads"] for value in values] == [THREADS, THREADS]
    environments = [(str(rank), "2", str(THREADS)) for rank in range(2)]
    assert [value["environment"] for value in values] == environments
    assert tensor.tolist() == [0.0] * 3


def leave_early(rank: int, world_size: int) -> None:
    dist.barrier()  # all ranks are connected
    if rank == 0:
        dist.destroy_process_group()


def test_a_function_may_leave_the_process_group_itself() -> None:
    assert run_ranks(leave_early, 2) == [None, None]


def per_rank(failure: pytest.ExceptionInfo[AssertionError]) -> list[str]:
    """The message, cut where another rank begins."""
    return re.split(r"\n\n(?=rank )", str(failure.value))


def raise_on_both(rank: int, world_size: int) -> None:
    raise ValueError(f"wrong number {rank + 40}")


def test_the_error_of_each_rank_is_told_with_its_traceback() -> None:
    with pytest.raises(AssertionError) as failure:
        run_ranks(raise_on_both, 2)
    first, second = per_rank(failure)
    assert first.startswith("rank 0 of 2 raised:")
    assert second.startswith("rank 1 of 2 raised:")
    assert "ValueError: wrong number 40" in first
    assert "ValueError: wrong number 41" in second
    assert "in raise_on_both" in first


def wait_for_ever(begun: Path | None = None) -> None:
    """Hang. The process that reads the named pipe *begun* continues when this one is here."""
    if begun is not None:
        begun.write_bytes(b"")
    threading.Event().wait()


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A named pipe: opening it waits until a second process opens its other end."""
    os.mkfifo(tmp_path / "begun")
    return tmp_path / "begun"


def raise_on_one(rank: int, world_size: int, begun: Path) -> None:
    if rank == 1:
        begun.read_bytes()
        raise ValueError("the others wait")
    wait_for_ever(begun)


def test_a_rank_that_waits_for_one_that_failed_is_killed_and_shows_where_it_stood(
    begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.distributed.GRACE", 0.5)
    with pytest.raises(AssertionError) as failure:
        run_ranks(raise_on_one, 2, begun)
    first, second = per_rank(failure)
    assert first.startswith("rank 0 of 2 had not finished 0.5 s after another had failed and was killed:")
    assert "wait_for_ever" in first
    assert "ValueError: the others wait" in second


def die(rank: int, world_size: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_dies_is_named_with_the_signal() -> None:
    with pytest.raises(AssertionError) as failure:
        run_ranks(die, 2)
    first, second = per_rank(failure)
    assert first.startswith("rank 0 of 2 was ended by SIGKILL before it returned")
    # Gloo sees the connection end; where it does not, the rank is killed.
    assert second.startswith(("rank 1 of 2 raised:", "rank 1 of 2 had not finished"))


def hang_on_one(rank: int, world_size: int, folder: Path) -> None:
    (folder / str(rank)).write_text(str(os.getpid()))
    if rank == 0:
        wait_for_ever(folder / "begun")


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_rank_that_hangs_is_named_and_no_process_outlives_the_timeout(
    tmp_path: Path, begun: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []

    def time_is_up(connections: list[Connection], limit: float) -> list[Any]:
        """Nothing is ready in time once one rank has returned and the other hangs."""
        limits.append(limit)
        if len(connections) == 2:
            return wait(connections)
        begun.read_bytes()
        return wait(connections, 0.5)

    monkeypatch.setattr("tests.distributed.wait", time_is_up)
    with pytest.raises(AssertionError) as failure:
        run_ranks(hang_on_one, 2, tmp_path, timeout=1000.0)
    assert 0 < limits[-1] < limits[0] < 1000.0
    assert str(failure.value).startswith("rank 0 of 2 had not finished in time and was killed:")
    assert "wait_for_ever" in str(failure.value)
    assert "rank 1" not in str(failure.value)
    assert not any(is_running(int((tmp_path / str(rank)).read_text())) for rank in range(2))


def end_badly(rank: int, world_size: int, begun: Path) -> None:
    if rank == 0:
        atexit.register(wait_for_ever, begun)
    else:
        atexit.register(os._exit, 3)


def test_a_rank_that_returns_but_does_not_end_well_fails(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_end, abandon = _Rank.expect_end, _Rank.abandon

    def expect_end_soon(rank: _Rank) -> None:
        """The rank that hangs is waited for no longer once it does; the other one has all the time it needs."""
        if rank.index == 0:
            begun.read_bytes()
            monkeypatch.setattr("tests.distributed.END", 0.5)
        expect_end(rank)

    def abandon_in_time(rank: _Rank, reason: str) -> None:
        monkeypatch.setattr("tests.distributed.END", END)
        abandon(rank, reason)

    monkeypatch.setattr(_Rank, "expect_end", expect_end_soon)
    monkeypatch.setattr(_Rank, "abandon", abandon_in_time)
    with pytest.raises(AssertionError) as failure:
        run_ranks(end_badly, 2, begun)
    first, second = per_rank(failure)
    assert first.startswith("rank 0 of 2 had returned, but its process did not end and was killed:")
    assert "wait_for_ever" in first
    assert second == "rank 1 of 2 had returned, but then ended with exit code 3"


def leave_a_thread(rank: int, world_size: int) -> None:
    threading.Thread(target=wait_for_ever, name=f"lightning_pipe-{rank}", daemon=True).start()


def test_a_rank_that_leaves_a_worker_thread_behind_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.distributed.END", 0.1)
    with pytest.raises(AssertionError, match="leave_a_thread left threads behind: lightning_pipe-0"):
        run_ranks(leave_a_thread, 1)


@pytest.mark.parametrize(
    ("name", "daemon", "counts"),
    [("lightning_pipe-prefetch", True, True), ("someone's", True, False), ("someone's", False, True)],
)
def test_workers_of_the_pipeline_and_threads_that_keep_the_process_alive_count_as_left(
    name: str, daemon: bool, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.distributed.END", 0.01)
    before = threading.enumerate()
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name=name, daemon=daemon)
    thread.start()
    try:
        assert threads_left(before) == ([name] if counts else [])
    finally:
        end.set()
        thread.join()
    assert threads_left(before) == []
