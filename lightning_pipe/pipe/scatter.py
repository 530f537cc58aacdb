"""Splitting of a mini-batch into micro-batches along its first dimension, and concatenation of their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipe._compat.torch import pytree
from lightning_pipe.engine import InputError


def count_batch_rows(value: Any) -> int:
    """Number of rows of a mini-batch: the common length of the first dimension of all its tensors."""
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    lengths = {len(tensor) for tensor in tensors if tensor.dim()}
    if len(lengths) != 1 or any(not tensor.dim() for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise InputError(
            f"the input has tensors of shapes {shapes or 'none'}; expected at least one, and the same length of the"
            " first dimension, along which micro-batches are split. Pass a value without rows as a plain number, or"
            " store it in the layer that uses it"
        )
    return lengths.pop()


def scatter(value: Any, chunks: int) -> list[Any]:
    """Split *value* into micro-batches."""
    chunks = max(1, min(chunks, count_batch_rows(value)))
    leaves, spec = pytree.tree_flatten(value)
    pieces = [torch.tensor_split(leaf, chunks) if isinstance(leaf, Tensor) else (leaf,) * chunks for leaf in leaves]
    return [pytree.tree_unflatten([piece[index] for piece in pieces], spec) for index in range(chunks)]


def concat_micro_batch_outputs(values: Sequence[Any], rows: Sequence[int] | None = None) -> Any:
    """Concatenate outputs of micro-batches; the inverse of :func:`scatter`."""
    flattened = [pytree.tree_flatten(value) for value in values]
    spec = flattened[0][1]
    if any(other_spec != spec for _, other_spec in flattened):
        raise InputError(
            f"the micro-batches' outputs have different structures, {spec} and others; expected the same structure for"
            " all micro-batches"
        )
    return pytree.tree_unflatten(
        [_concat_leaves([leaves[place] for leaves, _ in flattened], rows) for place in range(spec.num_leaves)], spec
    )


def to_device(value: Any, device: torch.device | str) -> Any:
    """Move every tensor of *value* to *device*."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device, non_blocking=True), value)


def _concat_leaves(leaves: Sequence[Any], rows: Sequence[int] | None) -> Any:
    first = leaves[0]
    if isinstance(first, Tensor):
        if not first.dim():
            raise InputError(
                "the last layer returns a tensor without dimensions for a micro-batch; expected a tensor with rows,"
                " which can be concatenated. To compute a loss, call pipe.loss(inputs, targets, loss_fn)"
            )
        for_each_row = (
            None if rows is None else {len(leaf) / max(1, count) for leaf, count in zip(leaves, rows, strict=True)}
        )
        if for_each_row is not None and (len(for_each_row) > 1 or for_each_row.pop() % 1):
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
            raise InputError(
                f"the last layer returns tensors of {shapes} for micro-batches of {', '.join(map(str, rows or ()))}"
                " rows; expected the micro-batch's rows, in order, in the first dimension. Compute values of the whole"
                " mini-batch after the pipe, or in pipe.loss"
            )
        return torch.cat(list(leaves))
    if any(leaf is not first and not _is_surely_equal(leaf, first) for leaf in leaves[1:]):
        raise InputError(
            f"the last layer returns {first!r} for the first micro-batch and another value for a later micro-batch;"
            " expected tensors with rows, or a value that is the same for all micro-batches"
        )
    return first


def _is_surely_equal(left: Any, right: Any) -> bool:
    try:
        return bool(left == right)
    except (ValueError, RuntimeError):  # for example arrays, which compare element by element
        return False
