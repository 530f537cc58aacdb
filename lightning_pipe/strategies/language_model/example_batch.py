"""A batch like those of training, before training begins: to measure with, and to see how large batches are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from lightning_pipe.engine import SetupError
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule

__all__ = ["example_batch"]

_NEEDED = (
    "needed is a DataLoader over a dataset with an index, or example_micro_batch() of the module and batch_size, the"
    " rows of a batch"
)


def example_batch(module: PipelineModule, loader: Any, batch_size: int | None) -> Any:
    """A batch on the CPU.

    Made of the rows of the module's ``example_micro_batch``, if it has one: as many as the loader's batches have. Else
    of the first rows of the loader's dataset, past sampler and workers, through the module's transfer hooks; what a
    dataset draws from global generators is drawn.

    Args:
        module: to be trained.
        loader: of its training data.
        batch_size: rows of a batch; None for the loader's.

    Raises:
        SetupError: there is none, or it is empty.
    """
    rows = batch_size if batch_size is not None else _batch_size(loader)
    example = module.example_micro_batch()
    if example is not None:
        if rows is None:
            raise SetupError(f"the rows of a batch are not known from a {type(loader).__name__}; {_NEEDED}")
        return _repeated(example, rows)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise SetupError(
            f"the training data are a {_kind(loader)}, of which a batch cannot be taken without being missed; {_NEEDED}"
        )
    whole = not loader._auto_collation  # the dataset's items are batches
    if rows is None and not whole:
        raise SetupError(
            f"the rows of a batch are not known from a {_kind(loader)} with a sampler of batches; {_NEEDED}"
        )
    dataset: Any = loader.dataset
    count = 1 if whole else min(rows or 0, len(dataset))
    if not count or not len(dataset):
        raise SetupError(f"the training data are empty; {_NEEDED}")
    fetcher: Any = _MapDatasetFetcher(dataset, not whole, loader.collate_fn, loader.drop_last)
    batch = fetcher.fetch(0 if whole else list(range(count)))
    return module._apply_batch_transfer_handler(batch, torch.device("cpu"))


def _kind(loader: Any) -> str:
    return f"{type(loader).__name__} of {type(loader.dataset).__name__}" if hasattr(loader, "dataset") else repr(loader)


def _batch_size(loader: Any) -> int | None:
    found = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return found if isinstance(found, int) else None


def _repeated(example: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The rows of an example again and again."""
    own = next((len(one) for one in example.values() if isinstance(one, Tensor) and one.ndim), 1)
    places = torch.arange(rows) % own
    return {
        key: value[places] if isinstance(value, Tensor) and value.ndim and len(value) == own else value
        for key, value in example.items()
    }
