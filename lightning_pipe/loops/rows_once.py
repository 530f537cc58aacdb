"""Distributed samplers for evaluation without repeated rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.trainer.connectors import data_connector
from torch.utils.data import DistributedSampler

__all__ = ["rows_once"]

_WARNING = "Using `DistributedSampler` with the dataloaders"


@contextmanager
def rows_once() -> Iterator[None]:
    """Context in which the samplers that Lightning adds to loaders do not repeat rows.

    For validation and test, Lightning's sampler repeats rows to give each rank the same number, so metrics count those
    rows twice. For prediction it does not repeat rows, but refuses fewer rows than ranks. In this context ranks may get
    uneven numbers of rows, or no row.
    """
    made_by = data_connector._get_distributed_sampler

    def sampler_of(*args: Any, mode: Any = None, **kwargs: Any) -> DistributedSampler[Any]:
        sampler = made_by(*args, **kwargs)
        if not sampler.drop_last:
            sampler.total_size = len(sampler.dataset)  # type: ignore[arg-type]
            sampler.num_samples = len(range(sampler.rank, sampler.total_size, sampler.num_replicas))
        return sampler

    data_connector._get_distributed_sampler = sampler_of
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_WARNING)  # not true here: no row is repeated
            yield
    finally:
        data_connector._get_distributed_sampler = made_by
