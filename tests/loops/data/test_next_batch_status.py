"""Ranks collect what all have posted, in rounds."""

from __future__ import annotations

import torch.distributed as dist

from lightning_pipe.loops.data.next_batch_status import Collected, Statuses, StatusGroup
from tests.distributed import run_ranks

ROUNDS = 20


def many_rounds(rank: int, size: int) -> tuple[list[Collected], Collected]:
    assert dist.group.WORLD is not None
    one = Statuses(dist.group.WORLD)
    heard = []
    for index in range(ROUNDS):
        # A rank says it could not fetch with a number below zero.
        one.post(index * (rank - 1), rank == index % (2 * size))
        heard.append(one.collect())
    one.post(7, False)
    one.forget()
    one.post(rank, False)
    return heard, one.collect()


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


def test_all_hear_the_least_the_greatest_and_the_flag_of_every_round() -> None:
    size = 3
    for heard, last in run_ranks(many_rounds, size):
        assert heard == [Collected(-index, index, index % (2 * size) < size) for index in range(ROUNDS)]
        assert last == Collected(0, size - 1, False)


def test_a_group_for_statuses_is_made_once_and_can_be_left_and_made_again() -> None:
    assert run_ranks(one_group_in_turns, 2) == [(True, [1, 2], 0)] * 2
