"""The harness of the tests with several processes tells what went wrong on each rank, and never hangs itself."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from tests.distributed import THREADS, run_ranks


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
    # A run of Lightning is over, which has set the handlers of all signals again.
    trainer = Trainer(accelerator="cpu", devices=1, barebones=True)
    trainer._signal_connector.register_signal_handlers()
    trainer._signal_connector.teardown()
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


def leave_a_thread(rank: int, world_size: int) -> None:
    threading.Thread(target=wait_for_ever, name=f"lightning_pipe-{rank}", daemon=True).start()


def test_a_rank_that_leaves_a_worker_thread_behind_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.distributed.END", 0.1)
    with pytest.raises(AssertionError, match="leave_a_thread left threads behind: lightning_pipe-0"):
        run_ranks(leave_a_thread, 1)
