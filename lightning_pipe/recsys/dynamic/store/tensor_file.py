"""Reader of tensors saved by ``torch.save`` that is safe for hostile files: no code runs, and memory use is bounded.

``torch.load(weights_only=True)`` runs no code either, but a few bytes can make it allocate any amount of memory. Here
the pickle is read by the unpickler in Python, which allocates at most about the size of the file, and only with the
opcodes that ``torch.save`` needs for tensors in dictionaries and lists. Functions named in the pickle are replaced by
functions of this module. The bytes of each tensor are an uncompressed part of the file.

Tested in ``tests/scenarios/fuzzing/test_store_files.py``.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any, ClassVar

import torch

__all__ = ["read_tensors"]

# Maximum size in bytes of the pickle, and of the list of the file's parts. Some hundred bytes per tensor are usual.
_LARGEST = 1 << 16
_BLOCK = 1 << 20
_OPCODES = (
    "PROTO EMPTY_DICT EMPTY_LIST EMPTY_TUPLE MARK BINPUT LONG_BINPUT BINGET LONG_BINGET BINUNICODE GLOBAL BINPERSID"
    " BININT BININT1 BININT2 LONG1 NEWTRUE NEWFALSE TUPLE TUPLE1 TUPLE2 TUPLE3 REDUCE APPEND APPENDS SETITEMS"
    " STOP"
)
_TYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


def read_tensors(file: IO[bytes]) -> Any:
    """Read an object saved by ``torch.save``: contiguous tensors in lists and in dictionaries with text keys.

    Args:
        file: an open regular file.

    Raises:
        ValueError: The file has other contents; the message describes them.
        OSError: The file cannot be read.
    """
    try:
        end = zipfile._EndRecData(file)  # type: ignore[attr-defined]  # before anything is allocated for it
        if not end or end[zipfile._ECD_SIZE] > _LARGEST:  # type: ignore[attr-defined]
            raise ValueError("it is not a file of tensors: it does not end with a list of its parts")
        with zipfile.ZipFile(file) as parts:
            if sum(entry.file_size for entry in parts.infolist()) > file.seek(0, io.SEEK_END):
                raise ValueError("its parts have more bytes than the file")
            return _Pickle(parts).read()
    except (OSError, ValueError):
        raise
    except Exception as error:  # an invalid zip file or pickle may raise any exception
        raise ValueError(f"it is not a file of tensors: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class _Storage:
    """Storage of a tensor: one part of the file."""

    dtype: torch.dtype
    values: torch.Tensor


# The unpickler in Python, which allocates no more than it has read. Its type stub hides its attributes.
_Unpickler: Any = pickle._Unpickler


class _Pickle(_Unpickler):
    def __init__(self, parts: zipfile.ZipFile) -> None:
        self._parts = parts
        self._entries = {entry.filename.partition("/")[2]: entry for entry in parts.infolist()}
        self._storages: dict[str, _Storage] = {}
        super().__init__(io.BytesIO(self._part("data.pkl", most=_LARGEST)))

    def read(self) -> Any:
        if "byteorder" in self._entries and self._part("byteorder", most=16) != b"little":
            raise ValueError("its numbers are not little-endian")
        return self.load()

    def load_setitems(self) -> None:
        items = self.pop_mark()
        # The hash or text of a hostile tuple may take forever, so values of unknown type are never hashed or printed.
        if type(self.stack[-1]) is not dict or any(type(key) is not str for key in items[::2]):
            raise ValueError("it has a dictionary with keys that are not texts")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    dispatch: ClassVar[dict[int, Any]] = {
        **{code: _Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in _OPCODES.split())},
        pickle.SETITEMS[0]: load_setitems,
    }

    def find_class(self, module: str, name: str) -> Callable[..., Any] | str:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if (module, name) == ("collections", "OrderedDict"):
            return _no_hooks
        if module == "torch" and name in _TYPES:
            return name
        raise ValueError(f"it names {module}.{name}")

    def persistent_load(self, found: Any) -> _Storage:
        if type(found) is not tuple or [type(one) for one in found] != [str, str, str, str, int]:
            raise ValueError("it has a part that is not a tensor's storage")
        _, name, key, _, count = found
        if name not in _TYPES or (key in self._storages and self._storages[key].dtype != _TYPES[name]):
            raise ValueError(f"its part {key!r:.50} has numbers of kind {name!r:.50}")
        if key not in self._storages:
            dtype = _TYPES[name]
            content = self._part(f"data/{key}", exactly=count * dtype.itemsize)
            values = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
            self._storages[key] = _Storage(dtype, values)
        return self._storages[key]

    def _part(self, name: str, *, exactly: int | None = None, most: int | None = None) -> bytearray:
        entry = self._entries[name]
        size = entry.file_size
        wrong = size != exactly if exactly is not None else most is not None and size > most
        if wrong or entry.compress_type != zipfile.ZIP_STORED or size != entry.compress_size:
            raise ValueError(f"its part {name!r} has {size} bytes, expected {exactly if most is None else most}, plain")
        content = bytearray(size)
        with self._parts.open(entry) as stream:
            for begin in range(0, size, _BLOCK):
                content[begin : begin + _BLOCK] = stream.read(min(_BLOCK, size - begin))
            stream.read(1)  # reading at the end verifies the checksum
        if len(content) != size:
            raise ValueError(f"its part {name!r} is truncated")
        return content


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, *rest: Any) -> Any:
    """Replacement of ``torch._utils._rebuild_tensor_v2`` for contiguous tensors."""
    numbers = [offset, *size, *stride] if type(size) is type(stride) is tuple and len(size) == len(stride) < 3 else [""]
    if not isinstance(storage, _Storage) or any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a tensor's storage, offset, size or strides are invalid")
    count = math.prod(size)
    if offset + count > len(storage.values):
        raise ValueError(f"a tensor has {count} numbers, but its part of the file has {len(storage.values)}")
    values = storage.values[offset : offset + count].view(size)
    if any(one != other for one, other, length in zip(stride, values.stride(), size, strict=True) if length > 1):
        raise ValueError(f"a tensor of size {size} has strides {stride}, expected {values.stride()}")
    return values


def _no_hooks() -> None:
    """Replacement of the ordered dictionary of backward hooks, which is empty for a saved tensor."""
