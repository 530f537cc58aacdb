"""Exchange of samples in two collectives, rows and ids, whose sizes every rank knows in advance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe.engine.ranks.object_collectives import collective_device
from lightning_pipe.recsys.balancing.partition import Ranks
from lightning_pipe.recsys.balancing.samples import Samples
from lightning_pipe.recsys.balancing.workload_gather import GatheredWorkloads

ExchangeKind = Literal["all_to_all", "all_gather"]

# Bytes from each rank to each rank: [source, destination].
_Sizes = npt.NDArray[np.int64]


def exchange_samples(
    samples: Samples, gathered: GatheredWorkloads, assignment: Ranks, group: dist.ProcessGroup, kind: ExchangeKind
) -> Any:
    """Return the batch with the samples assigned to this rank, ordered by their global number. Collective."""
    ranks, me = group.size(), group.rank()
    source = gathered.source
    local_samples = np.flatnonzero(source == me)
    order = np.argsort(assignment[local_samples], kind="stable")
    pairs = source.astype(np.int64) * ranks + assignment

    def sizes(weights: npt.NDArray[np.int64] | None = None) -> _Sizes:
        counted = np.bincount(pairs, weights=weights, minlength=ranks * ranks)
        return counted.astype(np.int64).reshape(ranks, ranks)

    totals = [sizes(ids) for ids in gathered.totals]
    of_streams = [totals[place] * each for place, each in samples.bytes_per_jagged_entry]
    picks = torch.from_numpy(order).to(samples.device)
    rows = _start_byte_exchange(group, kind, samples.pack_rows(picks), sizes() * samples.row_bytes)
    streams = samples.pack_streams(picks, [int(table[me].sum()) for table in totals])
    ids = None
    if streams:
        split = [stream.split(size[me].tolist()) for stream, size in zip(streams, of_streams, strict=True)]
        by_rank = torch.cat([part for to_rank in zip(*split, strict=True) for part in to_rank])
        ids = _start_byte_exchange(group, kind, by_rank, sum(of_streams))
    received_rows = rows()
    received: list[Tensor] = []
    if ids is not None:
        # Each source rank has sent its parts of all streams one after the other.
        parts = ids().split([int(size[rank, me]) for rank in range(ranks) for size in of_streams])
        received = [torch.cat(parts[place :: len(of_streams)]) for place in range(len(of_streams))]
    return samples.rebuild_batch(received_rows, received)


def _start_byte_exchange(
    group: dist.ProcessGroup, kind: ExchangeKind, sent: Tensor, sizes: Any
) -> Callable[[], Tensor]:
    """Submit bytes ordered by destination; return a function that waits for the bytes received from all ranks."""
    me, device = group.rank(), sent.device
    sent = sent.to(collective_device(group, device))
    if not sizes.sum():
        return lambda: torch.empty(0, dtype=torch.uint8, device=device)
    if kind == "all_to_all":
        received = sent.new_empty(int(sizes[:, me].sum()))
        work: Any = dist.all_to_all_single(
            received, sent, sizes[:, me].tolist(), sizes[me].tolist(), group=group, async_op=True
        )

        def wait() -> Tensor:
            work.wait()
            return received.to(device)

        return wait
    longest = int(sizes.sum(1).max())
    padded = torch.cat([sent, sent.new_zeros(longest - len(sent))])
    gathered = sent.new_empty(group.size(), longest)
    work = dist.all_gather(list(gathered), padded, group=group, async_op=True)
    begins = sizes[:, :me].sum(1).tolist()

    def wait_and_select_received_bytes() -> Tensor:
        work.wait()
        ends = [begin + size for begin, size in zip(begins, sizes[:, me].tolist(), strict=True)]
        parts = [row[begin:end] for row, begin, end in zip(gathered, begins, ends, strict=True)]
        return torch.cat(parts).to(device)

    return wait_and_select_received_bytes
