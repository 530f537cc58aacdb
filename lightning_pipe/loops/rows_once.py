"""Samplers of an evaluation that give each row to one rank, once."""

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
    """In the body, samplers that Lightning puts into loaders repeat no row.

    Lightning's sampler for validation and test repeats rows until all ranks have as many, which counts them twice in
    metrics; its sampler for prediction does not, and refuses fewer rows than ranks. Here ranks may have uneven numbers
    of batches, or none.
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
            warnings.filterwarnings("ignore", message=_WARNING)  # it says that rows are repeated
            yield
    finally:
        data_connector._get_distributed_sampler = made_by
