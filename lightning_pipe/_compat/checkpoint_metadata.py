"""Unpickles the file ``.metadata`` of ``torch.distributed.checkpoint``, whose own reader unpickles any class.

A pickle can call what it names. This unpickler knows only what a save writes there.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

__all__ = ["load_metadata"]


def load_metadata(stream: IO[bytes]) -> Metadata:
    """Metadata of a checkpoint folder; raises ``pickle.UnpicklingError`` for a pickle of anything else."""
    metadata = _MetadataUnpickler(stream).load()
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise pickle.UnpicklingError("it holds no Metadata with storage_data")
    if metadata.planner_data is None:
        metadata.planner_data = {}
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        full_name = f"{module}.{name}"
        if full_name not in _KNOWN:
            raise pickle.UnpicklingError(f"it holds {full_name}, which torch.distributed.checkpoint does not put there")
        return _KNOWN[full_name]


def _make_safe_unpickling_class(kind: type) -> type:
    """Class that makes empty instances of *kind*: a pickle that sets attributes of the class must not reach *kind*."""

    def new(_: type) -> Any:
        return object.__new__(kind)

    def reject_pickled_class_state(instance: Any, state: Any) -> None:
        """Never called with both arguments: a pickle that gives a state to the class itself gets a TypeError."""

    return type(kind.__name__, (), {"__new__": new, "__setstate__": reject_pickled_class_state})


_KINDS = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)
# Constructors of what a save writes, by their names in the pickle. Layouts and paths are not used by a load.
_KNOWN: dict[str, Callable[..., Any]] = {
    **{f"{kind.__module__}.{kind.__qualname__}": _make_safe_unpickling_class(kind) for kind in _KINDS},
    "torch.Size": torch.Size,
    "torch.serialization._get_layout": lambda name: torch.strided,
    f"{_MEM_FORMAT_ENCODING.__module__}.{_MEM_FORMAT_ENCODING.__qualname__}": lambda value: _MEM_FORMAT_ENCODING(value),
    # Python 3.11.0 to 3.11.3 pickle a member of an enum as getattr(the enum, the name).
    "builtins.getattr": lambda _, name: _MEM_FORMAT_ENCODING[name],
    **{
        f"{module}.{name}": lambda *parts: None
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath")
    },
}
