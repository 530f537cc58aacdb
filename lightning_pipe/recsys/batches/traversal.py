"""Traversal of a batch: finds its tensors and jagged tensors, and the paths to the same pieces in the next batch.

On the first batch, the rewrite finds the piece that feeds each sharded module. In every later batch it follows the
recorded path. A batch may be a tensor, a mapping, a sequence, a named tuple, a dataclass, an attrs class, any object
with attributes, or any nesting of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_pipe._compat.torchrec import kjts_share_tensors

LEAF_TYPES = (torch.Tensor, KeyedJaggedTensor, JaggedTensor, KeyedTensor)
_OPAQUE = (str, bytes, bytearray, bool, int, float, complex, type, torch.nn.Module)


@dataclasses.dataclass(frozen=True)
class AttributeStep:
    """Step of a path: an attribute of the current object."""

    name: str

    def __call__(self, value: Any) -> Any:
        return getattr(value, self.name)

    def __str__(self) -> str:
        return f".{self.name}"


@dataclasses.dataclass(frozen=True)
class ItemStep:
    """Step of a path: an element of the current sequence, or the value of a key of the current mapping."""

    key: Any

    def __call__(self, value: Any) -> Any:
        return value[self.key]

    def __str__(self) -> str:
        return f"[{self.key!r}]"


BatchPath = tuple[AttributeStep | ItemStep, ...]


def iterate_leaves(batch: Any) -> Iterator[tuple[BatchPath, Any]]:
    """Yield ``(path, piece)`` for every tensor, KeyedJaggedTensor, JaggedTensor and KeyedTensor in ``batch``.

    The order is fixed: depth first, fields as declared, mappings in their own order. An object that is reachable over
    two paths is yielded for both; a cycle is entered once.
    """
    yield from _iterate_nested_leaves(batch, (), ())


def _iterate_nested_leaves(value: Any, path: BatchPath, parents: tuple[int, ...]) -> Iterator[tuple[BatchPath, Any]]:
    if isinstance(value, LEAF_TYPES):
        yield path, value
        return
    if id(value) in parents:
        return
    parents = (*parents, id(value))
    for step, child in iterate_children(value):
        yield from _iterate_nested_leaves(child, (*path, step), parents)


def iterate_children(value: Any) -> Iterator[tuple[AttributeStep | ItemStep, Any]]:
    """Yield ``(step, part)`` for the entries, elements or attributes of ``value``."""
    if value is None or isinstance(value, _OPAQUE):
        return
    if isinstance(value, Mapping):
        yield from ((ItemStep(key), child) for key, child in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple: names are more readable than indices
        yield from ((AttributeStep(name), getattr(value, name)) for name in value._fields)
    elif isinstance(value, Sequence):
        yield from ((ItemStep(index), child) for index, child in enumerate(value))
    else:
        yield from ((AttributeStep(name), getattr(value, name)) for name in field_names(value) if hasattr(value, name))


def field_names(value: Any) -> list[str]:
    """Names of the attributes of an object that is neither a mapping nor a sequence, in order of declaration."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    else:  # attrs classes, with or without slots, list their fields; other classes have only __dict__
        names = [field.name for field in getattr(type(value), "__attrs_attrs__", ())]
    return names + [name for name in getattr(value, "__dict__", {}) if name not in names]


def get_at_path(path: BatchPath, batch: Any) -> Any:
    """The object at ``path`` in ``batch``."""
    value = batch
    for depth, step in enumerate(path):
        try:
            value = step(value)
        except (AttributeError, LookupError, TypeError) as error:
            raise LookupError(f"{format_path(path[:depth])} (a {type(value).__name__}) has no {step}") from error
    return value


def format_path(path: BatchPath) -> str:
    """``path`` as a user would write it: ``batch.sparse_features``, ``batch[0]['ids']``."""
    return "batch" + "".join(str(step) for step in path)


def is_same_leaf(first: Any, second: Any) -> bool:
    """Return True if two objects are the same piece of a batch: one object, or two KJTs over the same tensors.

    The second case is for batches whose properties wrap the same tensors in a new KeyedJaggedTensor at each access.
    """
    if first is second:
        return True
    if type(first) is not type(second) or not isinstance(first, KeyedJaggedTensor):
        return False
    return first.keys() == second.keys() and kjts_share_tensors(first, second)
