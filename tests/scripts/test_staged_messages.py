"""Messages through the host, on the CPU: the same values arrive, one by one and in batches."""

from __future__ import annotations

import torch
import torch.distributed as dist

from scripts.gpu.staged_messages import staged_messages
from tests.distributed import run_ranks


def exchange(rank: int, world: int) -> list[list[float]]:
    other = 1 - rank
    before = dist.isend, dist.irecv
    received = [torch.zeros(3), torch.zeros(3)]
    with staged_messages(lambda tensor: True):
        works = [dist.isend(torch.full((3,), 1.0 + rank), other), dist.irecv(received[0], other)]
        for work in works:
            assert work is not None
            work.wait()
        sent = torch.full((3,), 5.0 + rank)
        operations = [dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, received[1], other)]
        batch = dist.batch_isend_irecv(operations)
        sent.zero_()  # the message is a copy
        for one in batch:
            one.wait()
    assert (dist.isend, dist.irecv) == before
    return [one.tolist() for one in received]


def test_messages_through_the_host_arrive() -> None:
    assert run_ranks(exchange, 2) == [[[2.0] * 3, [6.0] * 3], [[1.0] * 3, [5.0] * 3]]
