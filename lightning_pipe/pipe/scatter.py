"""Cuts a mini-batch into micro-batches along its first dimension, and gathers their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipe._compat.torch import pytree
from lightning_pipe.engine import InputError

__all__ = ["gather", "rows_of", "scatter", "to_device"]


def rows_of(value: Any) -> int:
    """Rows of a mini-batch: the length that the first dimension of all its tensors has.

    Raises:
        InputError: no tensor has rows, or they differ.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    lengths = {len(tensor) for tensor in tensors if tensor.dim()}
    if not tensors:
        raise InputError(f"the input, a {type(value).__name__}, holds no tensor; needed is one at least, with rows")
    if len(lengths) != 1 or any(not tensor.dim() for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise InputError(
            f"the input's tensors have shapes {shapes}; needed is the same length in the first dimension of all, along"
            " which micro-batches are cut. Give what has no rows as a plain number, or to the module that uses it"
        )
    return lengths.pop()


def scatter(value: Any, chunks: int) -> list[Any]:
    """Cut *value* into micro-batches.

    Args:
        value: tensors in any nesting of tuples, lists and dictionaries, of the same length in their first dimension.
            Anything else in it goes to every micro-batch.
        chunks: how many; of *rows* rows the first ``rows % chunks`` have one row more than the others.

    Returns:
        *chunks* values of the same nesting, with views of the tensors; as many as there are rows, where that is less.

    Raises:
        InputError: see :func:`rows_of`.
    """
    chunks = max(1, min(chunks, rows_of(value)))
    leaves, spec = pytree.tree_flatten(value)
    pieces = [torch.tensor_split(leaf, chunks) if isinstance(leaf, Tensor) else (leaf,) * chunks for leaf in leaves]
    return [pytree.tree_unflatten([piece[index] for piece in pieces], spec) for index in range(chunks)]


def gather(values: Sequence[Any], rows: Sequence[int] | None = None) -> Any:
    """Put outputs of micro-batches together: the inverse of :func:`scatter`.

    Args:
        values: of each micro-batch.
        rows: of each; what is put together is to have as many, or some number for each row.

    Raises:
        InputError: outputs that cannot be put together: of different nesting, without rows, or with values other than
            tensors that differ.
    """
    flattened = [pytree.tree_flatten(value) for value in values]
    spec = flattened[0][1]
    if any(other != spec for _, other in flattened):
        raise InputError(
            f"the micro-batches' outputs are of different forms, {spec} and others; needed is one form for all"
        )
    return pytree.tree_unflatten(
        [_joined([leaves[place] for leaves, _ in flattened], rows) for place in range(spec.num_leaves)], spec
    )


def to_device(value: Any, device: torch.device | str) -> Any:
    """Every tensor of *value* on *device*."""
    return pytree.tree_map(lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf, value)


def _joined(leaves: Sequence[Any], rows: Sequence[int] | None) -> Any:
    first = leaves[0]
    if isinstance(first, Tensor):
        if not first.dim():
            raise InputError(
                "the last layer returns a tensor without dimensions for a micro-batch, which cannot be put together;"
                " needed are rows. A loss goes into pipe.loss(inputs, targets, loss_fn)"
            )
        for_each_row = (
            None if rows is None else {len(leaf) / max(1, count) for leaf, count in zip(leaves, rows, strict=True)}
        )
        if for_each_row is not None and (len(for_each_row) > 1 or for_each_row.pop() % 1):
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
            raise InputError(
                f"the last layer returns tensors of {shapes} for micro-batches of {', '.join(map(str, rows or ()))}"
                " rows, which cannot be put together along their first dimension; needed are the rows there, in their"
                " order. What is of a whole mini-batch belongs behind the pipe, or into pipe.loss"
            )
        if len({leaf.shape[1:] for leaf in leaves}) > 1:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
            raise InputError(
                f"the last layer returns tensors of {shapes} for micro-batches; needed is the same shape, but for the"
                " rows"
            )
        return torch.cat(list(leaves))
    if any(leaf is not first and not _equal(leaf, first) for leaf in leaves[1:]):
        raise InputError(
            f"the last layer returns {first!r} for the first micro-batch and another value for a later one; needed are"
            " tensors with rows, or what is the same for all"
        )
    return first


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (ValueError, RuntimeError):  # of arrays, say, which compare element by element
        return False
