"""Reads the files of a checkpoint so that none of them can run code, and a damaged one is named.

A pickle can call anything when it is loaded, and ``torch.distributed.checkpoint`` unpickles freely: the folder's
``.metadata``, and whatever is no tensor in the ranks' files. Here ``.metadata`` may hold what its writer puts there and
nothing else, and all other pickles go through the unpickler of ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from lightning_pipe.engine import SetupError

__all__ = ["SafePlanner", "SafeReader", "load_object", "unsafe_names"]


class SafeReader(dcp.FileSystemReader):
    """Reads a folder's files; an error of any names it.

    Args:
        folder: of a checkpoint.
        metadata: what :meth:`read_metadata` returned before; it is not read again.
    """

    def __init__(self, folder: Path, metadata: dcp.Metadata | None = None) -> None:
        super().__init__(folder)
        self._folder = folder
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """What is in the folder, of the file ``.metadata``.

        Raises:
            SetupError: it is damaged, or holds what no checkpoint needs.
        """
        if self._metadata is None:
            path = self._folder / ".metadata"
            with _named(path), path.open("rb") as stream:
                self._metadata = _checked(_MetadataUnpickler(stream).load())
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            path = self._folder / name
            with _named(path):
                with path.open("rb") as stream:
                    for item in items:
                        info = self.storage_data[item.storage_index]
                        _check_sums(_Span(stream, info.offset, info.length))
                super().read_data(dataclasses.replace(plan, items=items), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class SafePlanner(dcp.DefaultLoadPlanner):
    """Reads what is no tensor as :func:`load_object` does.

    Args:
        weights_only: see there.
        allow_partial_load: see :class:`torch.distributed.checkpoint.DefaultLoadPlanner`.
    """

    def __init__(self, *, weights_only: bool | None, allow_partial_load: bool = False) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, _load(value, self._weights_only))


def load_object(path: Path, weights_only: bool | None) -> Any:
    """What ``torch.save`` wrote, on the CPU.

    Args:
        path: of the file.
        weights_only: False to allow any class, whose code runs then; otherwise tensors, arrays of numpy, plain types
            and the classes that were given to ``torch.serialization.add_safe_globals``.

    Raises:
        SetupError: it is damaged, or holds a class that is not allowed; names the file and the class.
    """
    with _named(path), path.open("rb") as stream:
        _check_sums(stream)
        stream.seek(0)
        return _load(stream, weights_only)


def unsafe_names(saved: bytes) -> list[str]:
    """The classes and functions in what ``torch.save`` wrote that :func:`load_object` refuses by default."""
    with torch.serialization.safe_globals(_arrays()):
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(saved)))


# ---------------------------------------------------------------------- pickles of torch.save


def _load(stream: IO[bytes], weights_only: bool | None) -> Any:
    if weights_only is False:
        return torch.load(stream, map_location="cpu", weights_only=False)
    try:
        with torch.serialization.safe_globals(_arrays()):
            return torch.load(stream, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        reason = re.search(r"WeightsUnpickler error:\s*(.+)", str(error))
        found = name[1] if name else f"something else ({reason[1] if reason else error})"
        raise _Refused(
            f"it holds {found}, not only tensors, arrays of numbers and plain types, and could run any code when it is"
            " read. If you trust whoever wrote it, give weights_only=False, as in Trainer.fit(..., weights_only=False);"
            " or allow the class: torch.serialization.add_safe_globals([...])"
        ) from None


def _arrays() -> list[Any]:
    """What pickles of numpy's arrays and numbers call; their data are bytes."""
    core = importlib.import_module("numpy._core.multiarray" if hasattr(np, "_core") else "numpy.core.multiarray")
    # A pickle names the module that numpy had these in when it was written.
    functions = [
        (getattr(core, name), f"{module}.{name}")
        for module in ("numpy._core.multiarray", "numpy.core.multiarray")
        for name in ("_reconstruct", "scalar")
    ]
    kinds = {type(np.dtype(kind)) for kind in "?bhilqBHILQefdFDSU"}
    return [*functions, np.ndarray, np.dtype, *kinds]


class _Span(io.RawIOBase):
    """Some bytes of a file, as a file. (PyTorch's own counts from the end in the wrong direction.)"""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length = file, offset, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise OSError(f"there are {self._length} bytes only")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._position)]
        self._file.seek(self._offset + self._position)
        count: int = self._file.readinto(view)  # type: ignore[attr-defined]
        self._position += count
        return count


def _check_sums(stream: IO[bytes] | _Span) -> None:
    """Compare the contents with the checksums beside them, which ``torch.load`` does not."""
    with zipfile.ZipFile(stream) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise zipfile.BadZipFile(f"the checksum of {damaged} differs")


# ---------------------------------------------------------------------- the pickle .metadata


def _stand_in(real: type) -> type:
    """Makes instances of a class; what a pickle does to a class, such as set attributes, is done to this one."""
    return type(real.__name__, (), {"__new__": lambda _, *args: real.__new__(real, *args)})


_CLASSES: dict[tuple[str, str], type] = {
    (one.__module__, one.__name__): one
    for one in (
        *(dcp.Metadata, MetadataIndex, StorageMeta, _StorageInfo),
        *(TensorStorageMetadata, BytesStorageMetadata, TensorProperties, ChunkStorageMetadata),
        torch.Size,
    )
}
_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    (_MEM_FORMAT_ENCODING.__module__, _MEM_FORMAT_ENCODING.__name__): _MEM_FORMAT_ENCODING,
    # The path that it was written to; pathlib has had it in two modules.
    **{
        (module, name): Path
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath")
    },
}


class _MetadataUnpickler(pickle.Unpickler):
    """Makes what :class:`torch.distributed.checkpoint.Metadata` consists of, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key in _CLASSES:
            return _stand_in(_CLASSES[key])
        if key in _FUNCTIONS:
            function = _FUNCTIONS[key]
            return lambda *args: function(*args)
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _Refused(
            f"it holds {module}.{name}, which torch.distributed.checkpoint does not put there, and which could run any"
            " code when it is read. Take another checkpoint"
        )


def _checked(metadata: Any) -> dcp.Metadata:
    """Its types, as far as they say which files are read."""
    if not isinstance(metadata, dcp.Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise ValueError(f"it holds a {type(metadata).__name__}, needed is a Metadata")
    entries = metadata.storage_data.items()
    for index, info in entries:
        if not isinstance(index, MetadataIndex) or not isinstance(info, _StorageInfo):
            raise ValueError(f"it says where a {type(index).__name__} is by a {type(info).__name__}")
        if Path(info.relative_path).name != info.relative_path:
            raise _Refused(f"it refers to {info.relative_path!r}, which is not in its folder. Take another checkpoint")
    return metadata


# ---------------------------------------------------------------------- errors


class _Refused(Exception):
    """Its text says all that there is to say, but for the file."""


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Say which file it is that cannot be read."""
    try:
        yield
    except _Refused as error:
        raise SetupError(f"the checkpoint's file {str(path)!r} is refused: {error}") from None
    except Exception as error:  # whatever an unpickler makes of bytes that are no pickle
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        damaged = "" if isinstance(error, OSError) else ". It is damaged, or was not written whole"
        raise SetupError(
            f"the checkpoint's file {str(path)!r} cannot be read: {what}{damaged}; take another checkpoint"
        ) from error
