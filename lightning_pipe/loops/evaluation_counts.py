"""Compares the numbers of batches that ranks have to evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import IterableDataset

from lightning_pipe.engine import InputError
from lightning_pipe.engine.ranks.together import gather_or_raise

UNEVEN_ADVICE = (
    "All ranks work together on every batch. Let ranks without a batch join the other ranks"
    " (uneven_evaluation='join'), or give all ranks the same number of batches, with a sampler that pads or with"
    " drop_last=True"
)


class BatchCounts(NamedTuple):
    """Result of the comparison.

    Attributes:
        uneven: True if ranks have, or may have, different numbers of batches.
        refuses: True if an uneven number that is found later is an error.
        all_are_empty: True if no rank has a batch; None if ranks were not compared.
    """

    uneven: bool = False
    refuses: bool = False
    all_are_empty: bool | None = None


def compare_counts(
    trainer: pl.Trainer,
    what: str,
    loader: CombinedLoader,
    batches: Sequence[int | float],
    failed: Sequence[Exception],
    predicting: bool,
) -> BatchCounts:
    """Compare the numbers of batches of all ranks. Every rank calls this after its loaders are set up."""
    strategy = trainer.strategy
    refuses = getattr(strategy, "uneven_evaluation", "error") == "error"
    if trainer.world_size == 1 or (refuses and not getattr(strategy, "evaluates_together", False)):
        return BatchCounts()
    # Neither a limit on batches nor the length of an iterable dataset determines the number of batches.
    own = [many if _knows_length(one) else inf for one, many in zip(loader.flattened, batches, strict=True)]
    if loader._mode != "sequential":
        own = [min(own) if loader._mode == "min_size" else max(own)]
    error = failed[0] if failed else None
    ranks = gather_or_raise(own, error, f"loaders of {what} cannot be used", dist.group.WORLD, InputError)
    unknown = any(inf in of_rank for of_rank in ranks)
    refuses = refuses and not predicting
    even = all(of_rank == own for of_rank in ranks)
    if even or (not refuses and len(set(map(len, ranks))) == 1):
        return BatchCounts(unknown or not even, refuses, not any(map(any, ranks)))
    counts = ", ".join(f"{of_rank} on rank {rank}" for rank, of_rank in enumerate(ranks))
    raise InputError(f"ranks have uneven numbers of batches in {what}, for each dataloader: {counts}. {UNEVEN_ADVICE}")


def _knows_length(loader: Any) -> bool:
    return sized_len(loader) is not None and not isinstance(getattr(loader, "dataset", None), IterableDataset)
