"""Reads the file ``.metadata`` of ``torch.distributed.checkpoint`` without executing it, and checks all of its fields.

The checks bound all later reads by the sizes of the folder's files: each chunk of a tensor is in a file of the folder,
chunks do not overlap in a file, and the chunks of a tensor contain each of its elements exactly once.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
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

from lightning_pipe.checkpoints.inert_calls import PLAIN_CALLS
from lightning_pipe.checkpoints.inert_pickle import BUDGET, load_inert
from lightning_pipe.checkpoints.inert_tensors import DTYPES
from lightning_pipe.checkpoints.inert_values import Call, Pending, _Damaged, _Refused, described
from lightning_pipe.checkpoints.remote_folder import Folder

# Maximum nesting depth of a value in dicts and lists, and in lists alone.
_LEVELS, _LISTS = 16, 8
# Maximum number of dimensions along which the chunks of a tensor are smaller than the tensor.
_CUT_DIMENSIONS = 4
# Maximum number of list positions without a value. A list of empty dicts has such positions.
_EMPTY = 1000


def load_metadata(stream: IO[bytes], folder: Folder) -> dcp.Metadata:
    """Read and check the metadata of a checkpoint folder.

    Args:
        stream: the folder's open file ``.metadata``.
        folder: the checkpoint folder.

    Raises:
        _Refused: the file is damaged, holds values that no checkpoint needs, or does not match the folder's files.
    """
    found = load_inert(stream.read(), _find, budget=BUDGET + _size_of_data(folder))
    if type(found) is not dcp.Metadata:
        raise _Refused(f"it holds {described(found)}, expected a Metadata")
    _check_tensors(found)
    _check_files(found, folder)
    _check_paths(found)
    return found


def _size_of_data(folder: Folder) -> int:
    """Disk space of the other files in bytes. A checkpoint of many chunks has a large ``.metadata``."""
    if not isinstance(folder, Path):
        return sum(size for name, size in folder.sizes().items() if name != ".metadata")
    with os.scandir(folder) as entries:
        found = [entry.stat(follow_symlinks=False) for entry in entries if entry.name != ".metadata"]
    # Hard links to the same file count once.
    return sum({one.st_ino: 512 * one.st_blocks for one in found}.values())


# ---------------------------------------------------------------------- classes


def _check(what: str, value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise _Refused(f"{what} is {described(value)}, expected {' or '.join(kind.__name__ for kind in kinds)}")
    return value


def _index(state: dict[str, Any]) -> MetadataIndex:
    name = _check("fqn of storage_data", state.get("fqn"), str)
    offset = _check(f"offset of storage_data[{described(name)}]", state.get("offset"), torch.Size, type(None))
    return MetadataIndex(name, offset, _check("index of storage_data", state.get("index"), int, type(None)))


def _storage_info(state: dict[str, Any]) -> _StorageInfo:
    name = _check("relative_path of storage_data", state.get("relative_path"), str)
    if not name or Path(name).name != name or "\0" in name or len(name) > 255:
        raise _Refused(f"it refers to {described(name)} (relative_path of storage_data), which is not in its folder")
    if state.get("transform_descriptors"):
        raise _Refused(
            f"transform_descriptors of {described(name)} are not empty: its bytes are not stored as they are"
        )
    place = [_check(f"{field} of storage_data", state.get(field), int) for field in ("offset", "length")]
    if min(place) < 0:
        raise _Refused(
            f"storage_data of {described(name)} has the offset {place[0]} and length {place[1]}, expected at least 0"
        )
    return _StorageInfo(name, *place)


def _properties(state: Any) -> TensorProperties:
    # PyTorch 2.15 adds the strides that the tensor had in memory, which the files do not depend on.
    if type(state) is not tuple or len(state) not in (5, 6) or state[0] not in DTYPES.values():
        raise _Refused("properties of state_dict_metadata have no dtype, expected a numeric or boolean dtype")
    return TensorProperties(dtype=state[0])


def _tensor(state: dict[str, Any]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=_check("properties of state_dict_metadata", state.get("properties"), TensorProperties),
        size=_check("size of state_dict_metadata", state.get("size"), torch.Size),
        chunks=[
            _check("a chunk of state_dict_metadata", one, ChunkStorageMetadata)
            for one in _check("chunks of state_dict_metadata", state.get("chunks"), list)
        ],
    )


def _chunk(state: dict[str, Any]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        *(_check(f"{field} of a chunk", state.get(field), torch.Size) for field in ("offsets", "sizes"))
    )


def _metadata(state: dict[str, Any]) -> dcp.Metadata:
    return dcp.Metadata(
        state_dict_metadata=_check("state_dict_metadata", state.get("state_dict_metadata"), dict),
        planner_data=_check("planner_data", state.get("planner_data"), dict, type(None)) or {},
        storage_data=_check("storage_data", state.get("storage_data"), dict),
        storage_meta=StorageMeta(),
    )


def _with_state(name: str, build: Callable[[Any], Any], *states: type) -> Call:
    """Entry for a class whose instances a pickle creates without arguments and then fills from a state."""

    def checked(state: Any) -> Any:
        return build(_check(f"the state of {name}", state, *states))

    return Call(name, lambda: Pending(name, checked))


_MEMORY_FORMAT = Call("a memory format", lambda _: None)


def _member(owner: Any, name: Any) -> None:
    """Member of an enum, as Python 3.11.0 to 3.11.3 pickle it: ``getattr(the class, the name)``."""
    if owner is not _MEMORY_FORMAT or type(name) is not str:
        raise _Refused(f"it calls getattr on {described(owner)}, expected a memory format")


_RECORDS: dict[type, Callable[[Any], Any]] = {
    dcp.Metadata: _metadata,
    MetadataIndex: _index,
    StorageMeta: lambda state: StorageMeta(),
    _StorageInfo: _storage_info,
    TensorStorageMetadata: _tensor,
    ChunkStorageMetadata: _chunk,
}
_CALLS: dict[str, Any] = {
    **{f"{one.__module__}.{one.__name__}": _with_state(one.__name__, build, dict) for one, build in _RECORDS.items()},
    **DTYPES,
    **{name: PLAIN_CALLS[name] for name in ("torch.Size", "torch.serialization._get_layout")},
    f"{TensorProperties.__module__}.TensorProperties": _with_state("TensorProperties", _properties, tuple),
    f"{BytesStorageMetadata.__module__}.BytesStorageMetadata": Call("BytesStorageMetadata", BytesStorageMetadata),
    # Not used when a checkpoint is read: a memory layout, and the path that the folder was written to.
    f"{_MEM_FORMAT_ENCODING.__module__}.{_MEM_FORMAT_ENCODING.__name__}": _MEMORY_FORMAT,
    "builtins.getattr": Call("getattr", _member),
    **{
        f"{module}.{name}": Call("a path", lambda *_: None)
        for module in ("pathlib", "pathlib._local")
        for name in ("Path", "PosixPath", "WindowsPath")
    },
}


def _find(name: str) -> Any:
    if name in _CALLS:
        return _CALLS[name]
    raise _Refused(
        f"it holds {name}, which torch.distributed.checkpoint does not put there, and which could run arbitrary code"
        " when it is read"
    )


# ---------------------------------------------------------------------- fields


def _check_tensors(metadata: dcp.Metadata) -> None:
    """Check that each entry is stored in a file, and that the chunks of each tensor cover it exactly."""
    for index, info in metadata.storage_data.items():
        _check("a key of storage_data", index, MetadataIndex)
        _check(f"storage_data[{described(index.fqn)}]", info, _StorageInfo)
    for name, entry in metadata.state_dict_metadata.items():
        field = f"state_dict_metadata[{described(_check('a key of state_dict_metadata', name, str))}]"
        _check(field, entry, TensorStorageMetadata, BytesStorageMetadata)
        if isinstance(entry, BytesStorageMetadata):
            if MetadataIndex(name) not in metadata.storage_data:
                raise _Refused(f"{field} is in no file: storage_data has no such entry")
            continue
        _check_chunks(field, name, entry, metadata.storage_data)


def _check_chunks(
    field: str, name: str, entry: TensorStorageMetadata, places: Mapping[MetadataIndex, _StorageInfo]
) -> None:
    size = entry.size
    for chunk in entry.chunks:
        fits = len(chunk.offsets) == len(chunk.sizes) == len(size) and all(
            offset + length <= whole for offset, length, whole in zip(chunk.offsets, chunk.sizes, size, strict=True)
        )
        if not fits:
            raise _Refused(
                f"{field} of size {list(size)} has a chunk of size {list(chunk.sizes)} at {list(chunk.offsets)},"
                " expected a chunk inside the tensor"
            )
        place = places.get(MetadataIndex(name, chunk.offsets))
        if place is None:
            raise _Refused(
                f"{field} has a chunk at {list(chunk.offsets)} that is in no file: storage_data has no such entry"
            )
        if chunk.sizes.numel() * entry.properties.dtype.itemsize > place.length:
            raise _Refused(f"{field} has a chunk of size {list(chunk.sizes)}, got {place.length} bytes in storage_data")
    pieces = [(chunk.offsets, chunk.sizes) for chunk in entry.chunks if chunk.sizes.numel()]
    if not entry.chunks or not _cover(size, pieces):
        elements = sum(sizes.numel() for _, sizes in pieces)
        raise _Refused(
            f"{field} of size {list(size)} has {elements} elements in its chunks, expected each of {size.numel()} once"
        )


def _cover(size: Sequence[int], pieces: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Return True if chunks, given by offsets and sizes, contain each element of a tensor exactly once.

    This holds if and only if their corners, counted with alternating signs, are those of the whole tensor. Elements in
    no chunk would keep the previous content of their memory.
    """
    if not all(size):
        return not pieces
    cut = [dim for dim, whole in enumerate(size) if any(sizes[dim] != whole for _, sizes in pieces)]
    if len(cut) > _CUT_DIMENSIONS:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, offsets, sizes in [(-1, [0] * len(size), size), *((1, *piece) for piece in pieces)]:
        for ends in product((0, 1), repeat=len(cut)):
            corner = tuple(offsets[dim] + end * sizes[dim] for dim, end in zip(cut, ends, strict=True))
            corners[corner] += sign * (-1) ** sum(ends)
    return not any(corners.values())


def _check_files(metadata: dcp.Metadata, folder: Folder) -> None:
    """Check that each chunk is inside a file and that chunks do not overlap."""
    by_file: dict[str, list[tuple[int, int, str]]] = {}
    for index, info in metadata.storage_data.items():
        by_file.setdefault(info.relative_path, []).append((info.offset, info.offset + info.length, index.fqn))
    sizes = {} if isinstance(folder, Path) else folder.sizes()
    for file, places in by_file.items():
        size, last = _size_of(folder / file) if isinstance(folder, Path) else sizes.get(file), 0
        if size is None:
            raise _Refused(f"storage_data refers to the file {str(folder / file)!r}, which is not there")
        for begin, end, name in sorted(places):
            if begin < last:
                raise _Refused(f"storage_data[{described(name)}] begins at byte {begin} of {file!r}, in another entry")
            if end > size:
                raise _Damaged(
                    f"storage_data[{described(name)}] ends at byte {end} of {str(folder / file)!r}, which has {size}"
                    " bytes: one of these two files"
                )
            last = end


def _size_of(file: Path) -> int:
    try:
        status = file.lstat()
    except OSError as error:
        raise _Refused(
            f"storage_data refers to the file {str(file)!r}, which cannot be read: {error.strerror}"
        ) from None
    if not stat.S_ISREG(status.st_mode):
        raise _Refused(
            f"storage_data refers to {str(file)!r}, which is a link or a device, expected a file of the folder"
        )
    return status.st_size


def _check_paths(metadata: dcp.Metadata) -> None:
    """Check that each value has a distinct path, and that lists are no longer than their values require."""
    paths: set[Any] = set()
    lists: dict[Any, int] = {}
    for name, path in metadata.planner_data.items():
        field = f"planner_data[{described(name)}]"
        if name not in metadata.state_dict_metadata:
            raise _Refused(f"{field} is not in state_dict_metadata")
        if type(path) is not tuple or not 2 <= len(path) <= _LEVELS or {type(path[0]), type(path[1])} != {str}:
            raise _Refused(f"{field} is {described(path)}, expected 2 to {_LEVELS} names and list positions")
        numbers = [place for place, one in enumerate(path) if type(one) is int]
        if len(numbers) > _LISTS or any(type(one) not in (str, int) for one in path):
            raise _Refused(f"{field} has other elements than names and at most {_LISTS} list positions")
        for place in numbers:
            if not 0 <= path[place] < len(metadata.planner_data) + _EMPTY:
                raise _Refused(
                    f"{field} has the list position {described(path[place])}, for {len(metadata.planner_data)} values"
                )
            lists[path[:place]] = max(path[place] + 1, lists.get(path[:place], 0))
        paths.add(path)
    if sum(lists.values()) > 2 * len(paths) + _EMPTY:
        raise _Refused(f"planner_data has lists of {sum(lists.values())} positions for {len(paths)} values")
    for name, path in metadata.planner_data.items():
        for place in range(1, len(path)):
            if path[:place] in paths or (type(path[place]) is str and path[:place] in lists):
                raise _Refused(
                    f"planner_data[{described(name)}] has the path of another value, or a name as a list position"
                )
    if len(paths) < len(metadata.planner_data):
        raise _Refused("planner_data has two values with the same path")
