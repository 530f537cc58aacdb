"""Ranks hear what all have told, in rounds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from lightning_pipe.engine.ranks.batch_status import BatchStatusExchange, ReducedBatchStatus
from tests.distributed import run_ranks

ROUNDS = 20


def many_rounds(rank: int, size: int) -> tuple[list[ReducedBatchStatus], ReducedBatchStatus]:
    statuses = BatchStatusExchange()
    heard = []
    for index in range(ROUNDS):
        # A rank says it could not fetch with a number below zero.
        statuses.post(index * (rank - 1), rank == index % (2 * size))
        heard.append(statuses.collect())
    statuses.post(7, False)
    statuses.discard_pending()
    statuses.post(rank, False)
    return heard, statuses.collect()


def one_group_in_turns(rank: int, size: int) -> tuple[bool, list[int], int]:
    statuses, groups = BatchStatusExchange(), len(dist.distributed_c10d._world.pg_map)
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
    statuses.discard_pending()
    dist.destroy_process_group()  # as users may, before their trainer ends
    statuses.close()
    return same, heard, left


class Message:
    """A message of a step, in which a status travels."""

    def __init__(self, status: Sequence[int]) -> None:
        self.received: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(self.received, status)

    def wait_batch_statuses(self) -> list[Sequence[int]]:
        return self.received


def in_messages(rank: int, size: int) -> tuple[list[ReducedBatchStatus], list[bool], list[bool]]:
    """Statuses of rounds, whether each traveled in a message, and what another thread and another group were given."""
    statuses, collected, traveled, refused = BatchStatusExchange(), [], [], []
    world: Any = dist.group.WORLD
    part: Any = dist.new_group([0, 1])

    def offer() -> None:
        refused.append(statuses.take_status_to_send(world) is None)

    for index in range(ROUNDS):
        statuses.post(index * (rank - 1), rank == index % (2 * size))
        thread = threading.Thread(target=offer)
        thread.start()
        thread.join()
        if rank in (0, 1):
            refused.append(statuses.take_status_to_send(part) is None)
        # Now and then a round has no message.
        status = statuses.take_status_to_send(world) if index % 5 else None
        if status is not None:
            statuses.set_carrying_message(Message(status))
        traveled.append(status is not None)
        collected.append(statuses.collect())
    statuses.close()
    return collected, traveled, refused


def in_turn(rank: int, size: int) -> list[Any]:
    return [many_rounds(rank, size), in_messages(rank, size), one_group_in_turns(rank, size)]


def test_all_hear_the_least_the_greatest_and_the_flag_of_every_round_in_groups_that_are_left_and_made_again() -> None:
    size = 3
    for rounds, messages, groups in run_ranks(in_turn, size):
        heard, last = rounds
        assert messages[0] == heard
        # After a round without a message, the next status does not wait for one.
        assert messages[1] == [index % 5 > 1 for index in range(ROUNDS)]
        assert all(messages[2])
        assert heard == [ReducedBatchStatus(-index, index, index % (2 * size) < size) for index in range(ROUNDS)]
        assert last == ReducedBatchStatus(0, size - 1, False)
        assert groups == (True, [2, 3], 0)
