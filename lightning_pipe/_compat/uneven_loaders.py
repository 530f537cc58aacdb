"""Changes to Lightning's loader set-up for ranks with uneven numbers of rows, or without rows."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.loops import evaluation_loop, prediction_loop
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DistributedSampler

_WARNING = "Using `DistributedSampler` with the dataloaders"


@contextmanager
def allow_uneven_loaders(trainer: pl.Trainer) -> Iterator[list[Exception]]:
    """Context in which each row goes to one rank once, unless the strategy refuses uneven ranks.

    Lightning's sampler for validation and test repeats rows to give each rank the same number, so metrics count those
    rows twice. Its sampler for prediction does not repeat rows, but refuses fewer rows than ranks. Its set-up sums the
    lengths of sized loaders over ranks, which fails if only some ranks have a sized loader, and raises on a single rank
    if a limit leaves that rank without a batch. In this context samplers do not repeat rows, and ranks may have loaders
    of any kind and length.
    """
    failed: list[Exception] = []
    if trainer.world_size == 1 or getattr(trainer.strategy, "uneven_evaluation", "error") == "error":
        yield failed
        return
    sampler_of, parse = data_connector._get_distributed_sampler, data_connector._parse_num_batches

    def make_unpadded_distributed_sampler(*args: Any, mode: Any = None, **kwargs: Any) -> DistributedSampler[Any]:
        sampler = sampler_of(*args, **kwargs)
        if not sampler.drop_last:
            sampler.total_size = len(sampler.dataset)  # type: ignore[arg-type]
            sampler.num_samples = len(range(sampler.rank, sampler.total_size, sampler.num_replicas))
        return sampler

    def parse_or_note(*args: Any) -> int | float:
        try:
            return parse(*args)
        except MisconfigurationException as error:
            failed.append(error)
            return 0

    def has_length(loader: Any, *_: Any) -> bool:
        return sized_len(loader) is not None

    with ExitStack() as replaced:
        replaced.enter_context(
            patch.multiple(data_connector, _get_distributed_sampler=make_unpadded_distributed_sampler)
        )
        for loop in (evaluation_loop, prediction_loop):
            replaced.enter_context(patch.multiple(loop, has_len_all_ranks=has_length, _parse_num_batches=parse_or_note))
        replaced.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=_WARNING)  # not true here: no row is repeated
        yield failed
