"""What every rank tells the others about its samples before they are exchanged: one all-gather, waited for later.

A message has a fixed size, which all ranks must agree on before anyone knows how many samples the others have. So it
has room for as many as there were at most so far; where that is too little, its head says so, and once more is
gathered, with enough room for all. That happens at the first batch, and rarely afterwards::

    head: [failed, samples, jagged tensors, form]    for each place: workload (a double), ids in each jagged tensor

Tested in ``tests/recsys/balancing/test_balancer.py``.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.recsys.balancing.samples import Samples

__all__ = ["Gathered", "Gathering", "Room", "check_workloads"]

_HEAD = 4


@dataclass(frozen=True)
class Room:
    """What a message has room for.

    Args:
        samples: of one rank.
        jagged: jagged tensors.
    """

    samples: int = 0
    jagged: int = 0


@dataclass(frozen=True)
class Gathered:
    """What is known on every rank of all samples, which are numbered rank by rank.

    Args:
        failed: ranks whose batch cannot be balanced.
        forms_differ: whether ranks' batches have different forms.
        needed: the room that a message needs.
        complete: whether there was room, and nothing failed; if not, what follows is empty.
        source: of each sample, its rank.
        workloads: of each sample.
        totals: of each jagged tensor, the ids of each sample.
    """

    failed: tuple[int, ...]
    forms_differ: bool
    needed: Room
    complete: bool
    source: npt.NDArray[np.int32]
    workloads: npt.NDArray[np.float64]
    totals: npt.NDArray[np.int64]


def check_workloads(workloads: npt.NDArray[np.float64], source: npt.NDArray[np.int32]) -> None:
    """Raise the same error on every rank where a workload is none.

    Args:
        workloads: of all samples, rank by rank.
        source: of each, its rank.

    Raises:
        InputError: naming a sample and its rank.
    """
    wrong = ~(np.isfinite(workloads) & (workloads >= 0))
    if wrong.any():
        sample = int(wrong.argmax())
        rank = int(source[sample])
        place = sample - int(np.searchsorted(source, rank))
        raise InputError(
            f"sample {place} of rank {rank} has the workload {workloads[sample]}, and {int(wrong.sum())} sample(s) of"
            f" {len(wrong)} have such; needed are finite numbers from 0 up. Look at the balancer's workload function"
        )


class Gathering:
    """A message on its way to all ranks. Made on the thread that submits collectives; read on any.

    Args:
        samples: of this rank; None where its batch failed.
        workloads: of these, float64.
        room: of every rank's message.
        group: of all ranks.
        device: where its backend takes tensors.
    """

    def __init__(
        self,
        samples: Samples | None,
        workloads: torch.Tensor | None,
        room: Room,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._room = room
        message = torch.zeros(_HEAD + room.samples * (1 + room.jagged), dtype=torch.int64, device=device)
        if samples is None or workloads is None:
            message[0] = 1
        else:
            head = [0, samples.real, len(samples.totals), _digest(samples.description)]
            message[:_HEAD] = torch.tensor(head)
            if samples.real <= room.samples and len(samples.totals) == room.jagged:
                table = message[_HEAD:].view(1 + room.jagged, room.samples)[:, : samples.real]
                table[0].copy_(workloads.view(torch.int64))
                for row, totals in zip(table[1:], samples.totals, strict=True):
                    row.copy_(totals)
        self._messages = message.new_empty(group.size(), len(message))
        self._work = dist.all_gather(list(self._messages), message, group=group, async_op=True)
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            # Behind the collective on this stream; whoever reads waits for the event, and for no stream.
            self._work.wait()
            self._messages = self._messages.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> Gathered:
        """Wait for the messages of all ranks, and read them. Submits nothing."""
        if self._copied is not None:
            self._copied.synchronize()
        else:
            self._work.wait()
        messages = self._messages.numpy()
        failed = tuple(int(rank) for rank in np.flatnonzero(messages[:, 0]))
        there = [message for message in messages if not message[0]]
        counts = [int(message[1]) for message in messages]
        needed = Room(max(counts), max((int(message[2]) for message in there), default=0))
        forms_differ = len({int(message[3]) for message in there}) > 1
        complete = (
            not failed
            and not forms_differ
            and needed.samples <= self._room.samples
            and needed.jagged == self._room.jagged
        )
        source, table = np.zeros(0, np.int32), np.zeros((1 + needed.jagged, 0), np.int64)
        if complete:
            source = np.repeat(np.arange(len(messages), dtype=np.int32), counts)
            shape = (1 + self._room.jagged, self._room.samples)
            parts = [message[_HEAD:].reshape(shape)[:, :count] for message, count in zip(messages, counts, strict=True)]
            table = np.concatenate(parts, axis=1)
        return Gathered(failed, forms_differ, needed, complete, source, table[0].view(np.float64), table[1:])


def _digest(description: list[tuple[str, str]]) -> int:
    """A number of 63 bits, the same wherever the description is."""
    return int.from_bytes(hashlib.sha256(json.dumps(description).encode()).digest()[:8], "big") >> 1
