"""Deep snapshots of values whose tensors are detached and cloned. Each request returns a fresh copy."""

from __future__ import annotations

import copy
import types
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Grafts = Callable[[Tensor], Tensor]

# Never copied: they hold no data of an iteration, or are shared by all iterations.
_AS_THEY_ARE = (
    *(type(None), bool, int, float, complex, str, bytes, Enum, type, slice, range),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.Generator, torch.Stream, torch.Event),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, types.GeneratorType),
    *(nn.Module, torch.optim.Optimizer, dist.ProcessGroup, dist.Work, torch.futures.Future),
)


class ByReference:
    """Marker for a value that is returned as the same object, not copied."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Snapshot(ABC):
    """Snapshot of a value, created by :func:`take_snapshot`: a tree with a node for each part of the value."""

    parts: Iterable[Snapshot] = ()
    holds_tensor = False

    def copy_captured_value(self, graft: Grafts | None = None, copies: dict[int, Any] | None = None) -> Any:
        """Return a fresh copy of the value. *copies* maps the ids of nodes to the copies already made for this one."""
        copies = {} if copies is None else copies
        if id(self) not in copies:
            copies[id(self)] = self._build_copy(graft, copies)
        return copies[id(self)]

    def tensors(self) -> list[Tensor]:
        """Captured tensors, each once, in the order of traversal."""
        tensors: dict[int, Tensor] = {}
        self._collect_tensors(tensors, set())
        return list(tensors.values())

    @abstractmethod
    def _build_copy(self, graft: Grafts | None, copies: dict[int, Any]) -> Any: ...

    def _collect_tensors(self, tensors: dict[int, Tensor], seen: set[int]) -> None:
        if id(self) not in seen:
            seen.add(id(self))
            for part in self.parts:
                part._collect_tensors(tensors, seen)


class _ReferenceSnapshot(Snapshot):
    def __init__(self, value: Any) -> None:
        self._value = value

    def _build_copy(self, graft: Grafts | None, copies: dict[int, Any]) -> Any:
        return self._value


class _TensorSnapshot(Snapshot):
    """Captured tensor. It is copied again only if the last copy was changed in place."""

    holds_tensor = True

    def __init__(self, tensor: Tensor) -> None:
        self._requires_grad = tensor.requires_grad
        self._saved = tensor.detach().clone()
        self._out: Tensor | None = None
        self._version = 0

    def _build_copy(self, graft: Grafts | None, copies: dict[int, Any]) -> Any:
        out = self._out
        # Inference tensors have no version counter.
        if out is None or out.is_inference() or out._version != self._version:
            out = self._out = self._saved.clone()
            self._version = 0 if out.is_inference() else out._version
        detached = out.detach()
        return graft(detached) if graft is not None and self._requires_grad else detached

    def _collect_tensors(self, tensors: dict[int, Tensor], seen: set[int]) -> None:
        tensors[id(self)] = self._saved


class _CollectionSnapshot(Snapshot):
    """Collection that is built from its parts."""

    def __init__(self, parts: list[Snapshot], build: Callable[[list[Any]], Any]) -> None:
        self.parts = parts
        self.holds_tensor = any(part.holds_tensor for part in parts)
        self._build = build

    def _build_copy(self, graft: Grafts | None, copies: dict[int, Any]) -> Any:
        return self._build([part.copy_captured_value(graft, copies) for part in self.parts])


class _ObjectSnapshot(Snapshot):
    """Object with attributes, which may refer back to the object."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self.attributes: dict[str, Snapshot] = {}
        self.parts = self.attributes.values()

    def _build_copy(self, graft: Grafts | None, copies: dict[int, Any]) -> Any:
        copied = copies[id(self)] = copy.copy(self._value)
        for name, part in self.attributes.items():
            object.__setattr__(copied, name, part.copy_captured_value(graft, copies))
        return copied


def take_snapshot(value: Any) -> Snapshot:
    """Take a snapshot of *value*.

    Tensors are detached and cloned. Lists, tuples, sets and mappings are rebuilt, and so are objects that hold tensors.
    Parameters, modules, process groups, functions and similar objects are kept by reference, as are objects without
    tensors at any depth. An object that occurs twice in *value* is also a single object in each copy.
    """
    return _capture_value(value, {})


def _capture_value(value: Any, seen: dict[int, tuple[Any, Snapshot]]) -> Snapshot:
    """Create the node of *value*. *seen* also holds the values, so that their ids are not reused."""
    if isinstance(value, ByReference):
        return _ReferenceSnapshot(value.value)
    if isinstance(value, _AS_THEY_ARE):
        return _ReferenceSnapshot(value)
    if id(value) in seen:
        return seen[id(value)][1]
    if isinstance(value, Tensor):
        node: Snapshot = _ReferenceSnapshot(value) if isinstance(value, nn.Parameter) else _TensorSnapshot(value)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        node = _CollectionSnapshot([_capture_value(item, seen) for item in value], _make_collection_builder(value))
    elif isinstance(value, MutableMapping):
        keys = list(value)
        node = _CollectionSnapshot(
            [_capture_value(value[key], seen) for key in keys], _make_mapping_builder(value, keys)
        )
    else:
        return _capture_object(value, seen)
    seen[id(value)] = value, node
    return node


def _capture_object(value: Any, seen: dict[int, tuple[Any, Snapshot]]) -> Snapshot:
    attributes = _get_instance_attributes(value)
    node = _ObjectSnapshot(value)
    seen[id(value)] = value, node
    for name, attribute in attributes.items():
        node.attributes[name] = _capture_value(attribute, seen)
    node.holds_tensor = any(part.holds_tensor for part in node.parts)
    if not node.holds_tensor:
        seen[id(value)] = value, _ReferenceSnapshot(value)
    return seen[id(value)][1]


def _get_instance_attributes(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in _list_slot_names(getattr(kind, "__slots__", ()))]
    slot_values = {name: getattr(value, name) for name in slots if name != "__weakref__" and hasattr(value, name)}
    return {**slot_values, **getattr(value, "__dict__", {})}


def _list_slot_names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _make_collection_builder(value: Any) -> Callable[[list[Any]], Any]:
    kind = type(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return lambda parts: kind(*parts)
    if isinstance(value, deque):
        return lambda parts: kind(parts, value.maxlen)
    return kind


def _make_mapping_builder(value: MutableMapping[Any, Any], keys: list[Any]) -> Callable[[list[Any]], Any]:
    def build_mapping(parts: list[Any]) -> Any:
        mapping: Any = copy.copy(value)
        for key, part in zip(keys, parts, strict=True):
            mapping[key] = part
        return mapping

    return build_mapping
