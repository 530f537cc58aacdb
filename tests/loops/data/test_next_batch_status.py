"""Ranks hear what all have told, in rounds."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from lightning_pipe.loops.data.next_batch_status import Collected, Statuses
from tests.distributed import run_ranks

ROUNDS = 20


def many_rounds(rank: int, size: int) -> tuple[list[Collected], Collected]:
    statuses = Statuses()
    heard = []
    for index in range(ROUNDS):
        # A rank says it could not fetch with a number below zero.
        statuses.post(index * (rank - 1), rank == index % (2 * size))
        heard.append(statuses.collect())
    statuses.post(7, False)
    statuses.forget()
    statuses.post(rank, False)
    return heard, statuses.collect()


def one_group_in_turns(rank: int, size: int) -> tuple[bool, list[int], int]:
    statuses, groups = Statuses(), len(dist.distributed_c10d._world.pg_map)
    statuses.close()  # nothing was opened: nothing is left
    heard = []
    same = statuses.group is statuses.group
    for number in range(2):
        statuses.post(number + rank, False)
        heard.append(statuses.collect().greatest)
        dist.barrier()
        statuses.close()
        statuses.close()
    left = len(dist.distributed_c10d._world.pg_map) - groups
    statuses.post(0, False)
    statuses.forget()
    dist.destroy_process_group()  # as users may, before their trainer ends
    statuses.close()
    return same, heard, left


def in_turn(rank: int, size: int) -> list[Any]:
    return [many_rounds(rank, size), one_group_in_turns(rank, size)]


def test_all_hear_the_least_the_greatest_and_the_flag_of_every_round_in_groups_that_are_left_and_made_again() -> None:
    size = 3
    for rounds, groups in run_ranks(in_turn, size):
        heard, last = rounds
        assert heard == [Collected(-index, index, index % (2 * size) < size) for index in range(ROUNDS)]
        assert last == Collected(0, size - 1, False)
        assert groups == (True, [2, 3], 0)
