"""Order of an epoch's samples that ranks share, and its remainder for another number of ranks.

``DistributedSampler`` makes one order for all ranks, of which rank *r* of *w* takes positions r, r + w, r + 2w ...
When every rank has trained *n* batches of *b* samples, the first n * b * w samples are trained, and any number of ranks
can divide the remaining samples. Other samplers have a separate order for each rank, which another number of ranks
cannot continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

LoaderStateDict = dict[str, Any]


def get_distributed_sampler_state(loader: DataLoader[Any]) -> LoaderStateDict | None:
    """Return the order that the loader's ranks share, as numbers (see :func:`build_remaining_batches`), or None."""
    batches = loader.batch_sampler
    # Without automatic batching, the loader returns the dataset's entry for each index.
    sampler: Any = loader.sampler if batches is None else getattr(batches, "sampler", None)
    if type(batches) not in (BatchSampler, type(None)) or type(sampler) is not DistributedSampler:
        return None
    batch_size = 1 if batches is None else batches.batch_size  # type: ignore[attr-defined]
    return {
        "seed": sampler.seed,
        "epoch": sampler.epoch,
        "shuffle": sampler.shuffle,
        "length": len(sampler.dataset),  # type: ignore[arg-type]
        "batch": batch_size * sampler.num_replicas,
    }


def reshard_loader_states(
    states: Sequence[LoaderStateDict | None], rank: int, world: int
) -> list[LoaderStateDict | None] | None:
    """Convert states of loaders to another number of ranks."""
    converted: list[LoaderStateDict | None] = []
    for state in states:
        if state and "ended" in state:
            converted.append({"ended": []})
        elif state and state.get("order") is not None:
            order = state["order"]
            trained = order.get("trained", 0) + state["given"] * order["batch"]
            converted.append({"left": order | {"trained": trained}, "rank": rank, "world": world, "given": 0})
        else:
            return None
    return converted


def build_remaining_batches(
    state: LoaderStateDict, dataset: Any, batch_size: int | None, drop_last: bool = False
) -> list[list[int]] | list[int]:
    """Return a rank's batches of the remaining samples, the same number for each rank.

    If some ranks would have one more batch, the other ranks each repeat one sample from the beginning of the epoch, as
    ``DistributedSampler`` does. Otherwise the extra batch would not be trained.
    """
    left = state["left"]
    order: DistributedSampler[Any] = DistributedSampler(dataset, 1, 0, shuffle=left["shuffle"], seed=left["seed"])
    order.set_epoch(left["epoch"])
    indices, world = list(order), state["world"]
    remaining = indices[left["trained"] :]

    def build_rank_batches(rank: int) -> list[list[int]] | list[int]:
        rank_indices = remaining[rank::world]
        return rank_indices if batch_size is None else list(BatchSampler(rank_indices, batch_size, drop_last))

    # The first rank has the most samples, and the last rank the fewest.
    if len(build_rank_batches(0)) > len(build_rank_batches(world - 1)):
        remaining += islice(cycle(indices), -len(remaining) % world)
    return build_rank_batches(state["rank"])
