"""A loader's batch cut into the micro-batches of one schedule step, and what comes out of them joined again.

A schedule runs a fixed number of micro-batches of one shape. A batch that does not fill them is filled up at the end
with rows that train nothing and are dropped from the outputs. Only what has a row per sample can be cut: a packed
batch's document boundaries or a mask for all rows would be cut into something that still runs, so those are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipe._compat.torch import tree_flatten, tree_unflatten
from lightning_pipe.engine.common.errors import InputError

__all__ = ["MicroBatches", "count_tokens", "split_batch"]

# They describe a whole packed row, so no part of them belongs to a part of the rows, whatever their size.
_OF_ONE_PACKED_ROW = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


@dataclass(frozen=True)
class MicroBatches:
    """One schedule step's micro-batches, in order.

    Attributes:
        items: the micro-batches, each with the same number of rows.
        rows: rows of the loader's batch, over all micro-batches.
        padded_rows: rows added at the end to fill the last micro-batches.
    """

    items: list[dict[str, Any]]
    rows: int
    padded_rows: int

    def trim(self, outputs: Sequence[Any]) -> Any:
        """The micro-batches' outputs as one, with a row for each row of the loader's batch.

        Args:
            outputs: one a micro-batch: a tensor (rows of the micro-batch, ...), alike in all other dimensions, or
                tuples, lists and dicts of such tensors.

        Raises:
            InputError: another number of outputs than micro-batches, or of rows than they have.
        """
        if any(isinstance(output, (tuple, list, dict)) for output in outputs):
            flat, structures = zip(*map(tree_flatten, outputs), strict=True)
            if len(set(map(len, flat))) == 1:
                return tree_unflatten([self.trim(leaves) for leaves in zip(*flat, strict=True)], structures[0])
        found = [tuple(output.shape) if isinstance(output, Tensor) else () for output in outputs]
        if len(outputs) != len(self.items) or sum(shape[0] for shape in found if shape) != self.rows + self.padded_rows:
            raise InputError(
                f"the micro-batches' outputs have the shapes {found}; needed are {len(self.items)} tensors of together"
                f" {self.rows + self.padded_rows} rows, so that padded rows can be dropped: return one row of output"
                " for each row of input"
            )
        return torch.cat(list(outputs))[: self.rows]


def count_tokens(labels: Tensor, ignore_index: int = -100) -> int:
    """How many labels count in the loss: those that are not ``ignore_index``. Any shape."""
    return int((labels != ignore_index).sum())


def split_batch(
    batch: Any,
    num_microbatches: int,
    *,
    labels: str = "labels",
    ignore_index: int = -100,
    strict: bool = False,
) -> MicroBatches:
    """Cut a batch into micro-batches of equally many rows.

    Args:
        batch: either a mapping, of which every tensor has a row per sample in dimension 0 (the number of rows is that
            of ``"input_ids"``, or of the first tensor) and whatever is no tensor goes to every micro-batch as it is;
            or a list or tuple of mappings that are micro-batches already, such as packed ones, each with its own
            ``cu_seq_lens``. A batch for one micro-batch may hold anything.
        num_microbatches: m, at least 1.
        labels: key of the labels, which are ``ignore_index`` in rows that are added.
        ignore_index: the label that does not count in the loss.
        strict: refuse a batch that does not fill m equal micro-batches. Otherwise copies of the last row (of the last
            micro-batch, for a list) without labels fill it up.

    Returns:
        The micro-batches; tensors are views of the batch's where no row was added.

    Raises:
        InputError: no rows, something that cannot be cut by rows, or rows that do not fill m micro-batches while
            ``strict``.
    """
    if isinstance(batch, Mapping):
        return _cut(batch, num_microbatches, labels, ignore_index, strict)
    if isinstance(batch, (list, tuple)) and batch and all(isinstance(item, Mapping) for item in batch):
        return _take(batch, num_microbatches, labels, ignore_index, strict)
    raise InputError(
        f"the batch is {_describe(batch)}; needed is a mapping of tensors, or a list of {num_microbatches} such"
        " mappings, one a micro-batch: let the collate function return one"
    )


def _take(
    batch: Sequence[Mapping[str, Any]], num_microbatches: int, labels: str, ignore_index: int, strict: bool
) -> MicroBatches:
    """A batch that is a list of micro-batches: each row count the same, and as many as the schedule runs."""
    items = [dict(item) for item in batch]
    rows = [_rows(item) for item in items]
    if len(set(rows)) > 1:
        raise InputError(
            f"the batch's micro-batches have {rows} rows; needed is the same number in each, since a schedule sends"
            " tensors of one shape: pack them alike"
        )
    if len(items) > num_microbatches or (strict and len(items) < num_microbatches):
        raise InputError(
            f"the batch is a list of {len(items)} micro-batches; needed are num_microbatches={num_microbatches}: make"
            " the loader's batches that long, with drop_last=True where the data does not divide"
        )
    missing = num_microbatches - len(items)
    filler = dict(items[-1])
    if labels in filler:
        filler[labels] = torch.full_like(filler[labels], ignore_index)
    return MicroBatches(items + [dict(filler) for _ in range(missing)], sum(rows), missing * rows[-1])


def _cut(batch: Mapping[str, Any], num_microbatches: int, labels: str, ignore_index: int, strict: bool) -> MicroBatches:
    """A batch that is one mapping: groups of consecutive rows."""
    rows = _rows(batch)
    if num_microbatches == 1:
        return MicroBatches([dict(batch)], rows, 0)
    _check_can_be_cut(batch, rows, num_microbatches)
    size = -(-rows // num_microbatches)
    missing = size * num_microbatches - rows
    if missing and strict:
        raise InputError(
            f"the batch has {rows} rows, which do not fill num_microbatches={num_microbatches} equal micro-batches;"
            f" needed is a multiple of {num_microbatches}: change the loader's batch size, set drop_last=True, or set"
            " batching.strict_batches=False to have rows without labels added"
        )
    whole: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, Tensor) and missing:
            last = value[-1:].expand(missing, *value.shape[1:])
            value = torch.cat([value, torch.full_like(last, ignore_index) if key == labels else last])
        whole[key] = value
    items = [
        {key: value[start : start + size] if isinstance(value, Tensor) else value for key, value in whole.items()}
        for start in range(0, rows + missing, size)
    ]
    return MicroBatches(items, rows, missing)


def _rows(batch: Mapping[str, Any]) -> int:
    first = batch.get("input_ids")
    if not isinstance(first, Tensor):
        first = next((value for value in batch.values() if isinstance(value, Tensor)), None)
    if first is None or first.ndim == 0 or len(first) == 0:
        found = f"the keys {list(batch)} and no tensor with rows" if first is None or first.ndim == 0 else "no rows"
        raise InputError(f"the batch has {found}; needed is at least one row: take empty batches out of the loader")
    return len(first)


def _check_can_be_cut(batch: Mapping[str, Any], rows: int, num_microbatches: int) -> None:
    for key, value in batch.items():
        if key in _OF_ONE_PACKED_ROW:
            found = "which describes a packed row"
        elif isinstance(value, Tensor):
            if value.ndim and len(value) == rows:
                continue
            found = f"a tensor of shape {tuple(value.shape)}"
        elif any(True for _ in _tensors_in(value)):
            found = f"{_describe(value)} with tensors in it"
        else:
            continue
        raise InputError(
            f"the batch holds {key!r}, {found}, and cannot be cut into num_microbatches={num_microbatches}; needed are"
            f" tensors whose dimension 0 is the batch's {rows} rows: hand over a list of {num_microbatches}"
            " micro-batches instead, each with its own"
        )


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(inner)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return (
            f"a {type(value).__name__} of {len(value)} ({', '.join(sorted({type(item).__name__ for item in value}))})"
        )
    return f"a {type(value).__name__}"
