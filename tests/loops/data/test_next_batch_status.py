"""Ranks hear what all have told, in rounds; and that a rank has ended, however it did."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_pipe.loops.data import next_batch_status
from lightning_pipe.loops.data.next_batch_status import (
    Collected,
    ReducedStatuses,
    StatusBoard,
    Statuses,
    StatusGroup,
    statuses_of,
)
from tests.distributed import run_ranks
from tests.patience import HANG

ROUNDS = 200


def _board(group: dist.ProcessGroup) -> StatusBoard:
    made = StatusBoard.of(group)
    assert made is not None
    return made


MADE: dict[str, Callable[[dist.ProcessGroup], Statuses]] = {"board": _board, "reduced": ReducedStatuses}


def many_rounds(rank: int, size: int) -> dict[str, Any]:
    assert dist.group.WORLD is not None
    found: dict[str, Any] = {}
    for kind, make in MADE.items():
        one = make(dist.group.WORLD)
        heard = []
        for index in range(ROUNDS):
            # A rank says it could not fetch with a number below zero.
            one.post(index * (rank - 1), rank == index % (2 * size))
            heard.append(one.collect())
        one.post(7, False)
        one.forget()
        one.post(rank, False)
        found[kind] = heard, one.collect()
        dist.barrier()
        one.close()
        one.close()
    found["chosen"] = type(statuses_of(dist.group.WORLD)).__name__
    return found


def without_shared_memory(rank: int, size: int) -> str:
    # As a rank on another machine, which finds no such file, or another board's.
    assert dist.group.WORLD is not None
    if rank == 1:
        with mock.patch.object(next_batch_status, "_opened", return_value=None):
            return type(statuses_of(dist.group.WORLD)).__name__
    return type(statuses_of(dist.group.WORLD)).__name__


def with_another_file(rank: int, size: int) -> str:
    assert dist.group.WORLD is not None
    opened = next_batch_status._opened
    with mock.patch.object(next_batch_status, "_opened", lambda path, token, board: opened(path, token[::-1], board)):
        return type(statuses_of(dist.group.WORLD)).__name__


def one_leaves(rank: int, size: int) -> Any:
    assert dist.group.WORLD is not None
    board = StatusBoard.of(dist.group.WORLD)
    assert board is not None
    board.post(rank, False)
    board.collect()
    if rank == 1:
        board.close()
        return None
    board.post(0, False)
    with pytest.raises(RuntimeError) as raised:
        board.collect()
    return str(raised.value)


def silent(rank: int, size: int) -> str:
    assert dist.group.WORLD is not None
    with mock.patch.object(next_batch_status, "timeout_of", return_value=timedelta(seconds=0.3)):
        board = StatusBoard.of(dist.group.WORLD)
    assert board is not None
    said = ""
    if rank == 0:
        board.post(0, False)
        with pytest.raises(RuntimeError) as raised:
            board.collect()
        said = str(raised.value)
    dist.barrier()
    return said


def one_group_in_turns(rank: int, size: int) -> tuple[bool, list[int], int]:
    one, groups = StatusGroup(), len(dist.distributed_c10d._world.pg_map)
    one.close()  # nothing was opened: nothing is left
    heard = []
    group, statuses = one.open()
    same = one.open() == (group, statuses)
    for number in range(2):
        _, statuses = one.open()
        statuses.post(number + rank, False)
        heard.append(statuses.collect().greatest)
        dist.barrier()
        one.close()
        one.close()
    left = len(dist.distributed_c10d._world.pg_map) - groups
    one.open()
    dist.destroy_process_group()  # as users may, before their trainer ends
    one.close()
    return same, heard, left


@pytest.mark.parametrize("kind", list(MADE))
def test_all_hear_the_least_the_greatest_and_the_flag_of_every_round(kind: str) -> None:
    size = 3
    for found in run_ranks(many_rounds, size):
        heard, last = found[kind]
        assert heard == [Collected(-index, index, index % (2 * size) < size) for index in range(ROUNDS)]
        assert last == Collected(0, size - 1, False)
        assert found["chosen"] == "StatusBoard"


def test_where_one_rank_shares_no_memory_all_use_collectives() -> None:
    assert run_ranks(without_shared_memory, 3) == ["ReducedStatuses"] * 3
    assert run_ranks(with_another_file, 2) == ["ReducedStatuses"] * 2


def test_a_group_for_statuses_is_made_once_and_can_be_left_and_made_again() -> None:
    assert run_ranks(one_group_in_turns, 2) == [(True, [1, 2], 0)] * 2


def files_made(rank: int, size: int, call: Callable[[int, int], Any]) -> list[str]:
    """The files that this rank makes for boards."""
    names: list[str] = []
    make = tempfile.mkstemp

    def noted(*args: Any, **options: Any) -> tuple[int, str]:
        file, name = make(*args, **options)
        names.append(name)
        return file, name

    with mock.patch.object(tempfile, "mkstemp", noted):
        call(rank, size)
    return names


@pytest.mark.parametrize("call", [many_rounds, without_shared_memory])
def test_no_file_is_left(call: Callable[[int, int], Any]) -> None:
    made = [name for of_rank in run_ranks(files_made, 2, call) for name in of_rank]
    assert made
    assert not [name for name in made if os.path.exists(name)]


def test_a_rank_that_has_left_is_an_error_on_the_others() -> None:
    assert run_ranks(one_leaves, 2) == ["rank 1 has ended", None]


OTHER_RANK = """
import os, signal, sys
from lightning_pipe.loops.data.next_batch_status import StatusBoard
board = StatusBoard(os.open(sys.argv[1], os.O_RDWR), 1, 2, 1200.0)
board.post(5, True)
print(board.collect(), flush=True)
board.post(6, False)
print("told", flush=True)
signal.pause()
"""


def test_a_rank_that_was_killed_is_an_error_behind_what_it_told(tmp_path: Path) -> None:
    path = tmp_path / "board"
    path.write_bytes(bytes(next_batch_status._bytes(2)))
    board = StatusBoard(os.open(path, os.O_RDWR), 0, 2, HANG)
    board.post(1, False)
    with subprocess.Popen([sys.executable, "-c", OTHER_RANK, str(path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "Collected(least=1, greatest=5, flagged=True)\n"
        assert other.stdout.readline() == "told\n"
        other.kill()  # and nobody waits for it: its process is still to be seen
        assert board.collect() == Collected(1, 5, True)
        board.post(7, False)
        assert board.collect() == Collected(6, 7, False)
        board.post(8, False)
        with pytest.raises(RuntimeError, match="rank 1 has ended"):
            board.collect()
    board.close()


def test_a_rank_that_tells_and_ends_while_it_is_looked_at_was_heard(tmp_path: Path) -> None:
    path = tmp_path / "board"
    path.write_bytes(bytes(next_batch_status._bytes(2)))
    board, other = (StatusBoard(os.open(path, os.O_RDWR), rank, 2, 60.0) for rank in range(2))

    def ends(rank: int) -> bool:
        other.post(5, True)
        return True

    board.post(1, False)
    with mock.patch.object(next_batch_status, "_LOOK", -1.0), mock.patch.object(board, "_has_ended", ends):
        assert board.collect() == Collected(1, 5, True)
    other.close()
    board.close()


def test_a_rank_that_tells_nothing_is_an_error_after_the_timeout() -> None:
    assert run_ranks(silent, 2)[0] == "rank 1 has not posted a status for 0.3 s"
