"""Evaluation in which ranks wait for each other in every batch, though they may have uneven numbers of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_pipe.engine import InputError

__all__ = ["LastPrediction", "check_even"]


def check_even(trainer: pl.Trainer) -> None:
    """See that all ranks evaluate as many batches; every rank calls this when it begins to.

    Raises:
        InputError: on every rank: some have fewer, and the others would wait for them.
    """
    own = list(trainer._evaluation_loop.max_batches)
    ranks = _of_all_ranks(own)
    if any(batches != own for batches in ranks):
        counts = ", ".join(f"{batches} on rank {rank}" for rank, batches in enumerate(ranks))
        raise InputError(
            f"ranks have uneven numbers of batches to evaluate, for each dataloader: {counts}. In every batch all ranks"
            " work together: give them as many, by a sampler that fills up (Lightning's own does) or by drop_last=True"
        )


class LastPrediction:
    """Predictions of a rank that has fewer batches: it takes part in the others' with its last one once more.

    Lightning gives ranks uneven numbers of batches to predict, so that no row is predicted twice.

    Args:
        batches: of this rank, for each dataloader; every rank makes one of these at the same time.
    """

    def __init__(self, batches: Sequence[int | float]) -> None:
        ranks = [sum(of_rank) for of_rank in _of_all_ranks(list(batches))]
        self._missing = max(ranks) - sum(batches) if max(ranks) < float("inf") else 0
        self._again: Callable[[], Any] | None = None
        if self._missing and not sum(batches):
            raise InputError(
                f"this rank has no batch to predict, and others have {int(max(ranks))}; needed is one for each: predict"
                " on fewer devices, or in smaller batches"
            )

    def predicted(self, again: Callable[[], Any]) -> None:
        """Note how the batch just predicted is predicted again."""
        self._again = again if self._missing else None

    def finish(self) -> None:
        """Take part in what the other ranks have yet to predict."""
        missing, self._missing = self._missing, 0
        for _ in range(int(missing)):
            assert self._again is not None
            self._again()
        self._again = None


def _of_all_ranks(own: list[int | float]) -> list[list[int | float]]:
    ranks = [own] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    return ranks
