"""A loader's batch cut into the micro-batches of one schedule step, and their outputs joined again.

A schedule runs a fixed number of micro-batches of one shape. A batch that does not fill them is padded at the end with
rows that do not train and are dropped from the outputs. Only tensors with one row per sample can be cut, in dimension 0
or in a given one. The document boundaries of packed rows are cut into those of each row, for micro-batches of one row.
Other values, such as a mask for all rows, are refused unless they are to be the same for all micro-batches: cut by rows
they would be wrong, but would still run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_pipe._compat.torch import tree_flatten, tree_unflatten
from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.batches.host_values import copy_to_device_of
from lightning_pipe.llm.batches.padding import BOUNDARIES, PadValues


@dataclass(frozen=True)
class MicroBatches:
    """One schedule step's micro-batches, in order."""

    items: list[dict[str, Any]]
    rows: int
    padded_rows: int

    def merge_outputs(self, outputs: Sequence[Any]) -> Any:
        """Join the outputs of the micro-batches, with one row for each row of the loader's batch."""
        if any(isinstance(output, (tuple, list, dict)) for output in outputs):
            flat, structures = zip(*map(tree_flatten, outputs), strict=True)
            if len(set(map(len, flat))) == 1:
                return tree_unflatten([self.merge_outputs(leaves) for leaves in zip(*flat, strict=True)], structures[0])
        if all(output is None for output in outputs):
            return None
        shapes = [tuple(output.shape) if isinstance(output, Tensor) else () for output in outputs]
        if (
            len(outputs) != len(self.items)
            or sum(shape[0] for shape in shapes if shape) != self.rows + self.padded_rows
        ):
            raise InputError(
                f"the micro-batches' outputs have the shapes {shapes}; expected {len(self.items)} tensors with a total"
                f" of {self.rows + self.padded_rows} rows, so that padded rows can be dropped. Return one row of output"
                " for each row of input"
            )
        return torch.cat(list(outputs))[: self.rows]


def count_loss_tokens(labels: Tensor, ignore_index: int = -100) -> int:
    """Number of labels that count in the loss, which are not ``ignore_index``. Labels may have any shape."""
    return int((labels != ignore_index).sum())


def split_batch(
    batch: Any, num_microbatches: int, padding: PadValues | None = None, *, strict: bool = False, on_host: Any = None
) -> MicroBatches:
    """Cut a batch into micro-batches with the same number of rows.

    Document boundaries are read from *on_host*, the batch with its values on the host (default: from the batch).
    """
    if isinstance(batch, Mapping):
        host_batch = batch if on_host is None else on_host
        return _split_rows_into_microbatches(batch, num_microbatches, padding or PadValues(), strict, host_batch)
    if isinstance(batch, (list, tuple)) and batch and all(isinstance(item, Mapping) for item in batch):
        return _make_microbatches_from_list(batch, num_microbatches, padding or PadValues(), strict)
    raise InputError(
        f"the batch is {_describe_value(batch)}; expected a mapping of tensors, or a list of {num_microbatches} such"
        " mappings, one for each micro-batch. Return one of them from the collate function"
    )


def slice_batch_rows(batch: Mapping[str, Any], start: int, count: int, rows: int, padding: PadValues) -> dict[str, Any]:
    """Take ``count`` of a batch's ``rows``, from ``start``; values without as many rows are unchanged."""
    return {
        key: value.narrow(dim, start, count) if dim is not None and value.shape[dim] == rows else value
        for key, value, dim in _iter_items_with_row_dim(batch, padding)
    }


def _iter_items_with_row_dim(batch: Mapping[str, Any], keys: PadValues) -> Iterator[tuple[str, Any, int | None]]:
    """Keys and values of a batch with the dimension of their rows; None for a value that has no such dimension."""
    for key, value in batch.items():
        dim = keys.chunk_dims.get(key, 0)
        yield key, value, dim if isinstance(value, Tensor) and dim is not None and value.ndim > dim else None


def _make_microbatches_from_list(
    batch: Sequence[Mapping[str, Any]], num_microbatches: int, keys: PadValues, strict: bool
) -> MicroBatches:
    """Use a list as micro-batches, which must have the same number of rows and not exceed the schedule's number."""
    items = [dict(item) for item in batch]
    rows = [_count_rows(item, keys) for item in items]
    if len(set(rows)) > 1:
        raise InputError(
            f"the batch's micro-batches have {rows} rows; expected the same number in each, since a schedule sends"
            " tensors of one shape. Pack them into the same number of rows"
        )
    if len(items) > num_microbatches or (strict and len(items) < num_microbatches):
        raise InputError(
            f"the batch is a list of {len(items)} micro-batches; expected num_microbatches={num_microbatches}. Make"
            " the loader's batches of this length, with drop_last=True if the data does not divide evenly"
        )
    missing = num_microbatches - len(items)
    filler = dict(items[-1])
    if "labels" in filler:
        filler["labels"] = torch.full_like(filler["labels"], keys.labels)
    return MicroBatches(items + [dict(filler) for _ in range(missing)], sum(rows), missing * rows[-1])


def _split_rows_into_microbatches(
    batch: Mapping[str, Any], num_microbatches: int, keys: PadValues, strict: bool, on_host: Mapping[str, Any]
) -> MicroBatches:
    """Cut a mapping into groups of consecutive rows."""
    rows = _count_rows(batch, keys)
    if num_microbatches == 1 and not _lists_boundaries(batch):
        return MicroBatches([dict(batch)], rows, 0)
    size = -(-rows // num_microbatches)
    boundaries = [
        {key: copy_to_device_of(next(_tensors_in(batch.get(key)), None), value) for key, value in of_row.items()}
        for of_row in _split_boundaries(on_host, rows, size, keys)
    ]
    if num_microbatches == 1:
        return MicroBatches([dict(batch) | (boundaries[0] if boundaries else {})], rows, 0)
    batch = {key: value for key, value in batch.items() if not any(key in of_row for of_row in boundaries)}
    _check_batch_can_be_split(batch, rows, num_microbatches, keys)
    missing = size * num_microbatches - rows
    if missing and strict:
        raise InputError(
            f"the batch has {rows} rows, which do not fill num_microbatches={num_microbatches} equal micro-batches;"
            f" expected a multiple of {num_microbatches}. Change the loader's batch size, set drop_last=True, or set"
            " batching.strict_batches=False to add rows without labels"
        )
    padded: dict[str, Any] = dict(batch)
    for key, value, dim in _iter_items_with_row_dim(batch, keys) if missing else ():
        if dim is not None:
            last = value.narrow(dim, rows - 1, 1)
            added = torch.full_like(last, keys.labels) if key == "labels" else last
            padded[key] = torch.cat([value, *[added] * missing], dim)
    starts = range(0, rows + missing, size)
    items = [slice_batch_rows(padded, start, size, rows + missing, keys) for start in starts]
    if boundaries:
        items = [item | boundaries[min(row, rows - 1)] for row, item in enumerate(items)]
    return MicroBatches(items, rows, missing)


def _split_boundaries(batch: Mapping[str, Any], rows: int, size: int, keys: PadValues) -> list[dict[str, Any]]:
    """Document boundaries of each packed row, with the length of its longest document; empty without boundaries.

    A batch has them as a list with the boundaries in each row, or as one tensor with those in all rows, one behind the
    other, where each row begins with a document.
    """
    by_row: list[dict[str, Any]] = [{} for _ in range(rows)]
    _, length = keys.get_microbatch_rows_and_length(batch)
    for key, longest in BOUNDARIES.items():
        name = key if key in batch else longest
        if name not in batch or keys.chunk_dims.get(name, 0) is None:
            continue
        parts = _list_boundaries_by_row(batch.get(key), rows, length)
        if size > 1 or len(parts) != rows:
            raise InputError(
                f"the batch holds {name!r}, {_describe_value(batch[name])}, for {rows} packed rows of {length} tokens"
                f" in micro-batches of {size}; expected micro-batches of one row, and a list of {rows} tensors, the"
                f" boundaries of the documents in each row, or one tensor from 0 to {rows * length} with the boundaries"
                f" in all rows, among them each multiple of {length}. Set num_microbatches to the number of rows, or"
                f" pass a list of micro-batches, each one packed row with its own {key!r}"
            )
        for boundaries, part in zip(by_row, parts, strict=True):
            boundaries[key] = part
            if longest in batch:
                boundaries[longest] = int(part.diff().max())
    return by_row if any(by_row) else []


def _list_boundaries_by_row(boundaries: Any, rows: int, length: int) -> list[Tensor]:
    """Boundaries of the documents in each row, of those rows that have them."""
    if isinstance(boundaries, Tensor):
        if boundaries.ndim != 1:
            return []
        if ((boundaries < 0) | (boundaries > rows * length)).any():
            return []
        # The boundary between two rows is the end of one and the begin of the other.
        parts = [
            boundaries[(boundaries >= begin) & (boundaries <= begin + length)] - begin
            for begin in range(0, rows * length, length or 1)
        ]
        whole = [part for part in parts if part.numel() > 1 and part[0] == 0]
        return whole if len(whole) == rows and all(part[-1] == length for part in whole[:-1]) else []
    if not isinstance(boundaries, (list, tuple)):
        return []
    return [part for part in boundaries if isinstance(part, Tensor) and part.ndim == 1 and part.numel() > 1]


def _lists_boundaries(batch: Mapping[str, Any]) -> bool:
    return any(isinstance(batch.get(key), (list, tuple)) for key in BOUNDARIES)


def _count_rows(batch: Mapping[str, Any], keys: PadValues) -> int:
    sizes = {key: value.shape[dim] for key, value, dim in _iter_items_with_row_dim(batch, keys) if dim is not None}
    rows = sizes.get("input_ids", next(iter(sizes.values()), 0))
    if not rows:
        content = "no rows" if sizes else f"the keys {list(batch)} and no tensor with rows"
        raise InputError(f"the batch has {content}; expected at least one row. Remove empty batches from the loader")
    return rows


def _check_batch_can_be_split(batch: Mapping[str, Any], rows: int, num_microbatches: int, keys: PadValues) -> None:
    for key, value, dim in _iter_items_with_row_dim(batch, keys):
        if keys.chunk_dims.get(key, 0) is None:
            continue
        fix = f"Set its entry of batching.chunk_dims to None to give all of {key!r} to each micro-batch"
        if isinstance(value, Tensor):
            if dim is not None and value.shape[dim] == rows:
                continue
            description = f"a tensor of shape {tuple(value.shape)}"
            if rows in value.shape:
                fix = f"Name the dimension of its rows in batching.chunk_dims, such as {value.shape.index(rows)}. {fix}"
        elif tuple(getattr(value, "shape", ()))[:1] == (rows,):  # such as an array, or a mask of flex attention
            description = f"a {type(value).__name__} of shape {tuple(value.shape)}"
        elif any(True for _ in _tensors_in(value)):
            description = f"{_describe_value(value)} with tensors in it"
        else:
            continue
        raise InputError(
            f"the batch holds {key!r}, {description}, and cannot be cut into num_microbatches={num_microbatches};"
            f" expected tensors whose dimension {keys.chunk_dims.get(key, 0)} is the batch's {rows} rows."
            f" {fix}; or pass a list of {num_microbatches} micro-batches instead, each with its own {key!r}"
        )


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(inner)


def _describe_value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (list, tuple)):
        return (
            f"a {type(value).__name__} of {len(value)} ({', '.join(sorted({type(item).__name__ for item in value}))})"
        )
    return f"a {type(value).__name__}"
