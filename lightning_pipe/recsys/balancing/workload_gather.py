"""Asynchronous all-gather of the workloads and id counts of all ranks' samples, before the exchange.

All ranks must agree on the message size before they know the other ranks' numbers of samples. The message therefore has
room for the largest number of samples so far. If that is too small, its head shows it, and a second all-gather runs
with enough room for all ranks. This happens on the first batch and rarely afterwards::

    head: [failed, samples, jagged tensors, form]    for each place: workload (a double), ids in each jagged tensor
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

_HEAD = 4


@dataclass(frozen=True)
class MessageCapacity:
    """Capacity of a message: samples of one rank, and jagged tensors."""

    samples: int = 0
    jagged: int = 0


@dataclass(frozen=True)
class GatheredWorkloads:
    """Gathered information on all samples, numbered rank by rank; the same on every rank."""

    failed: tuple[int, ...]  # ranks whose batch cannot be balanced
    forms_differ: bool
    required_capacity: MessageCapacity
    complete: (
        bool  # messages were large enough, no rank failed and the forms agree; otherwise the fields below are empty
    )
    source: npt.NDArray[np.int32]  # rank of each sample
    workloads: npt.NDArray[np.float64]
    totals: npt.NDArray[np.int64]  # ids of each sample in each jagged tensor, [jagged tensors, samples]


def check_workloads(workloads: npt.NDArray[np.float64], source: npt.NDArray[np.int32]) -> None:
    """Raise the same error on every rank if a workload is negative or not finite."""
    wrong = ~(np.isfinite(workloads) & (workloads >= 0))
    if wrong.any():
        sample = int(wrong.argmax())
        rank = int(source[sample])
        place = sample - int(np.searchsorted(source, rank))
        raise InputError(
            f"sample {place} of rank {rank} has the workload {workloads[sample]}; expected finite numbers >= 0, but"
            f" {int(wrong.sum())} of {len(wrong)} sample(s) have invalid ones. Fix the balancer's workload function"
        )


class PendingWorkloadGather:
    """All-gather of a message in flight. Created on the thread that submits collectives; may be read on any thread."""

    def __init__(
        self,
        samples: Samples | None,
        workloads: torch.Tensor | None,
        capacity: MessageCapacity,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._capacity = capacity
        message = torch.zeros(_HEAD + capacity.samples * (1 + capacity.jagged), dtype=torch.int64, device=device)
        if samples is None or workloads is None:
            message[0] = 1
        else:
            head = [0, samples.num_samples, len(samples.id_counts_per_sample), _hash_description(samples.description)]
            message[:_HEAD] = torch.tensor(head)
            if samples.num_samples <= capacity.samples and len(samples.id_counts_per_sample) == capacity.jagged:
                table = message[_HEAD:].view(1 + capacity.jagged, capacity.samples)[:, : samples.num_samples]
                table[0].copy_(workloads.view(torch.int64))
                for row, totals in zip(table[1:], samples.id_counts_per_sample, strict=True):
                    row.copy_(totals)
        self._messages = message.new_empty(group.size(), len(message))
        self._work = dist.all_gather(list(self._messages), message, group=group, async_op=True)
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            # The copy follows the collective on this stream. A reader waits for the event instead of the whole stream.
            self._work.wait()
            self._messages = self._messages.to("cpu", non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> GatheredWorkloads:
        """Wait for the messages of all ranks and parse them. Submits no collective."""
        if self._copied is not None:
            self._copied.synchronize()
        else:
            self._work.wait()
        messages = self._messages.numpy()
        failed = tuple(int(rank) for rank in np.flatnonzero(messages[:, 0]))
        valid_messages = [message for message in messages if not message[0]]
        counts = [int(message[1]) for message in messages]
        needed = MessageCapacity(max(counts), max((int(message[2]) for message in valid_messages), default=0))
        forms_differ = len({int(message[3]) for message in valid_messages}) > 1
        complete = (
            not failed
            and not forms_differ
            and needed.samples <= self._capacity.samples
            and needed.jagged == self._capacity.jagged
        )
        source, table = np.zeros(0, np.int32), np.zeros((1 + needed.jagged, 0), np.int64)
        if complete:
            source = np.repeat(np.arange(len(messages), dtype=np.int32), counts)
            shape = (1 + self._capacity.jagged, self._capacity.samples)
            parts = [message[_HEAD:].reshape(shape)[:, :count] for message, count in zip(messages, counts, strict=True)]
            table = np.concatenate(parts, axis=1)
        return GatheredWorkloads(failed, forms_differ, needed, complete, source, table[0].view(np.float64), table[1:])


def _hash_description(description: list[tuple[str, str]]) -> int:
    """63-bit digest of the description, the same on every rank."""
    return int.from_bytes(hashlib.sha256(json.dumps(description).encode()).digest()[:8], "big") >> 1
