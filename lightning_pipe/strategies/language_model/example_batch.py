"""Example batch, available before training begins, for measurements and for the size of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_pipe._compat.lightning import transfer_batch_with_hooks
from lightning_pipe.engine import SetupError
from lightning_pipe.strategies.language_model.pipeline_module import PipelineModule

_NEEDED = (
    "Use a DataLoader over a map-style dataset, or define example_micro_batch() in the module and pass batch_size, the"
    " number of rows in a batch."
)


def example_batch(module: PipelineModule, loader: Any, batch_size: int | None) -> Any:
    """Return a batch like those of training, on the CPU.

    If the module defines ``example_micro_batch``, its rows are repeated to the size of a batch. Otherwise the batch
    consists of the first rows of the loader's dataset, which are read without sampler and workers and pass through the
    module's transfer hooks. A dataset that draws from global generators then advances them.
    """
    rows = batch_size if batch_size is not None else _get_loader_batch_size(loader)
    example = module.example_micro_batch()
    if example is not None:
        if rows is None:
            raise SetupError(f"The number of rows in a batch is unknown for a {type(loader).__name__}. {_NEEDED}")
        return _repeat_example_to_batch_size(example, rows)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise SetupError(
            f"No batch can be read in advance from {_describe_loader(loader)}, since training would miss it. {_NEEDED}"
        )
    items_are_batches = loader.batch_sampler is None  # the dataset's items are batches
    if rows is None and not items_are_batches:
        raise SetupError(
            f"The number of rows in a batch is unknown for a {_describe_loader(loader)} with a batch sampler. {_NEEDED}"
        )
    dataset: Any = loader.dataset
    count = 1 if items_are_batches else min(rows or 0, len(dataset))
    if items_are_batches:
        items = dataset[0]
    elif hasattr(dataset, "__getitems__"):
        items = dataset.__getitems__(list(range(count)))
    else:
        items = [dataset[place] for place in range(count)]
    return transfer_batch_with_hooks(module, loader.collate_fn(items), torch.device("cpu"))


def _describe_loader(loader: Any) -> str:
    return f"{type(loader).__name__} of {type(loader.dataset).__name__}" if hasattr(loader, "dataset") else repr(loader)


def _get_loader_batch_size(loader: Any) -> int | None:
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _repeat_example_to_batch_size(example: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Repeat the rows of an example up to the given number."""
    example_rows = next((len(value) for value in example.values() if isinstance(value, Tensor) and value.ndim), 1)
    places = torch.arange(rows) % example_rows
    return {
        key: value[places] if isinstance(value, Tensor) and value.ndim and len(value) == example_rows else value
        for key, value in example.items()
    }
