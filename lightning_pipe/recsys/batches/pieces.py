"""Walks a batch: which tensors and jagged tensors it holds, and how to reach the same place in the next batch.

The rewrite finds, on the first batch, the piece that feeds each sharded module; from then on it follows the recorded
path in every batch. A batch may be a tensor, a mapping, a sequence, a named tuple, a dataclass, an attrs class, any
object with attributes, or these nested.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_pipe._compat.torchrec import same_tensors

__all__ = ["PIECES", "Attribute", "Item", "Path", "children", "describe", "field_names", "follow", "same_piece", "walk"]

PIECES = (torch.Tensor, KeyedJaggedTensor, JaggedTensor, KeyedTensor)
_OPAQUE = (str, bytes, bytearray, bool, int, float, complex, type, torch.nn.Module)


@dataclasses.dataclass(frozen=True)
class Attribute:
    """One step of a path: an attribute of the object so far."""

    name: str

    def __call__(self, value: Any) -> Any:
        return getattr(value, self.name)

    def __str__(self) -> str:
        return f".{self.name}"


@dataclasses.dataclass(frozen=True)
class Item:
    """One step of a path: an element of the sequence, or the value of a key of the mapping, so far."""

    key: Any

    def __call__(self, value: Any) -> Any:
        return value[self.key]

    def __str__(self) -> str:
        return f"[{self.key!r}]"


Path = tuple[Attribute | Item, ...]


def walk(batch: Any) -> Iterator[tuple[Path, Any]]:
    """Yields ``(path, piece)`` for every tensor, keyed or plain jagged tensor and keyed tensor in ``batch``.

    Pieces come in a fixed order (fields as declared, mappings as ordered), depth first. An object reached over two
    paths is yielded for each; a cycle is entered once.
    """
    yield from _walk(batch, (), ())


def _walk(value: Any, path: Path, parents: tuple[int, ...]) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, PIECES):
        yield path, value
        return
    if id(value) in parents:
        return
    parents = (*parents, id(value))
    for step, child in children(value):
        yield from _walk(child, (*path, step), parents)


def children(value: Any) -> Iterator[tuple[Attribute | Item, Any]]:
    """The steps from ``value`` to its parts, and these: entries, elements, or attributes."""
    if value is None or isinstance(value, _OPAQUE):
        return
    if isinstance(value, Mapping):
        yield from ((Item(key), child) for key, child in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple: its names read better than numbers
        yield from ((Attribute(name), getattr(value, name)) for name in value._fields)
    elif isinstance(value, Sequence):
        yield from ((Item(index), child) for index, child in enumerate(value))
    else:
        yield from ((Attribute(name), getattr(value, name)) for name in field_names(value) if hasattr(value, name))


def field_names(value: Any) -> list[str]:
    """The attributes of an object that is neither mapping nor sequence, as declared."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    else:  # attrs classes, with slots or not, carry their fields' names; everything else is asked for its attributes
        names = [field.name for field in getattr(type(value), "__attrs_attrs__", ())]
    return names + [name for name in getattr(value, "__dict__", {}) if name not in names]


def follow(path: Path, batch: Any) -> Any:
    """The object at ``path`` in ``batch``.

    Raises:
        LookupError: ``batch`` has nothing there; the message is the part of the path that was found.
    """
    value = batch
    for depth, step in enumerate(path):
        try:
            value = step(value)
        except (AttributeError, LookupError, TypeError) as error:
            raise LookupError(f"{describe(path[:depth])} (a {type(value).__name__}) has no {step}") from error
    return value


def describe(path: Path) -> str:
    """``path`` as a user would write it: ``batch.sparse_features``, ``batch[0]['ids']``."""
    return "batch" + "".join(str(step) for step in path)


def same_piece(one: Any, other: Any) -> bool:
    """Whether two objects are the same piece of a batch: one object, or two jagged tensors over the same tensors.

    The second case is for batches whose properties wrap the same tensors anew at each access.
    """
    if one is other:
        return True
    if type(one) is not type(other) or not isinstance(one, KeyedJaggedTensor):
        return False
    return one.keys() == other.keys() and same_tensors(one, other)
