"""Constructors for the plain types and NumPy arrays in a pickle of ``torch.save``.

An array is made of a dtype from a fixed list, a shape, and exactly the bytes that these require. The item size follows
from the dtype's name. The state that a pickle gives to a dtype may set its byte order and no other property.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from lightning_pipe.checkpoints.inert_values import Call, Pending, _Refused, check_key, described, whole_size

# ---------------------------------------------------------------------- plain types


def _ordered(items: Any = ()) -> OrderedDict[Any, Any]:
    made: OrderedDict[Any, Any] = OrderedDict()
    for key, value in _items("an OrderedDict", items):
        check_key(key)
        made[key] = value
    return made


def _counter(items: Any = None) -> Counter[Any]:
    if type(items) not in (dict, type(None)):
        raise _Refused(f"a Counter is made of {described(items)}, expected a dict")
    made: Counter[Any] = Counter()
    dict.update(made, items or {})
    return made


def _set(items: Any = ()) -> set[Any]:
    for one in _items("a set", items):
        check_key(one)
    return set(items)


def _items(what: str, items: Any) -> Any:
    if type(items) not in (list, tuple):
        raise _Refused(f"{what} is made of {described(items)}, expected a list")
    return items


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise _Refused(f"a complex number is made of {described(real)}, {described(imaginary)}, expected two floats")
    return complex(real, imaginary)


def _bytearray(content: Any = b"", encoding: Any = "latin-1") -> bytearray:
    return bytearray(content if type(content) is bytes else _encode(content, encoding))


def _no_bytes() -> bytes:
    """Empty bytes, as protocol 2 writes them."""
    return b""


def _encode(text: Any, encoding: Any) -> bytes:
    """Bytes that protocol 2 writes as text."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise _Refused(f"bytes are made of {described(text)} in {described(encoding)}, expected text in latin1")
    return text.encode("latin1")


def _size(items: Any = ()) -> torch.Size:
    return torch.Size(whole_size("a torch.Size", items))


def _device(kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or len(kind) > 64 or type(index) not in (int, type(None)):
        raise _Refused(f"a device is made of {described(kind)}, expected its name")
    return torch.device(kind) if index is None else torch.device(kind, index)


_LAYOUTS = {
    str(one): one
    for one in (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}


def _layout(name: Any) -> torch.layout:
    if type(name) is not str or name not in _LAYOUTS:
        raise _Refused(f"a layout is {described(name)}, expected one of {', '.join(_LAYOUTS)}")
    return _LAYOUTS[name]


_MAKERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _ordered,
    "collections.Counter": _counter,
    "builtins.set": _set,
    "builtins.complex": _complex,
    "builtins.bytearray": _bytearray,
    "builtins.bytes": _no_bytes,
    "_codecs.encode": _encode,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
}
PLAIN_CALLS = {name: Call(name, make) for name, make in _MAKERS.items()}

# ---------------------------------------------------------------------- arrays

# Booleans, integers, floating-point and complex numbers, and bytes and text, whose names contain their length.
_TYPES = re.compile(r"b1|[iu][1248]|f[248]|c8|c16|[SU](0|[1-9]\d{0,5})")
_LAST_CHARACTER = 0x10FFFF


def _dtype(name: Any, align: Any = False, copy: Any = True) -> Pending:
    if type(name) is not str or not _TYPES.fullmatch(name) or align or type(copy) not in (bool, int):
        raise _Refused(f"an array's dtype is {described(name)}, expected numbers, booleans, bytes or text")
    kind = np.dtype(name)
    size = (kind.itemsize, 4 if kind.kind == "U" else 1)

    def build(state: Any) -> np.dtype[Any]:
        """Check a dtype's state: version, byte order, sub-array, names, fields, item size, alignment and flags.

        Version 4 appends metadata.
        """
        if type(state) is not tuple or len(state) not in (8, 9) or state[1] not in ("<", ">", "|", "="):
            raise _Refused(f"the dtype {name!r} of an array has a state that NumPy does not write")
        _, order, sub_array, names, fields, *sizes = state
        expected = [size[0], size[1]] if kind.kind in "SU" else [-1, -1]
        if (sub_array, names, fields) != (None, None, None) or sizes[:2] != expected or sizes[2] not in (0, 8):
            raise _Refused(
                f"the dtype {name!r} of an array has a state with another size, fields or flags than its name implies"
            )
        if len(sizes) > 3 and sizes[3] is not None:
            raise _Refused(f"the dtype {name!r} of an array has metadata, expected none")
        return kind.newbyteorder(order) if order in "<>" else kind

    return Pending(f"the dtype {name!r}", build)


def _values(kind: Any, shape: Any, raw: Any, order: Any = False) -> np.ndarray[Any, Any]:
    """Array made of raw bytes, whose number and values are checked."""
    if not isinstance(kind, np.dtype) or type(raw) is not bytes or type(order) not in (bool, int):
        raise _Refused(f"an array of {described(kind)} is made of {described(raw)}, expected a dtype and bytes")
    shape = whole_size("an array's shape", shape)
    count = math.prod(shape)
    # An item size of 0 is allowed for one element only: more elements would take time without taking bytes.
    if len(shape) > 32 or count * kind.itemsize != len(raw) or count > max(len(raw), 1):
        raise _Refused(
            f"an array of {kind} and shape {shape} is made of {len(raw)} bytes, expected {count * kind.itemsize}"
        )
    if kind.kind == "b" and raw.translate(None, b"\0\1"):
        raise _Refused("a boolean array has bytes other than 0 and 1")
    if (
        kind.kind == "U"
        and raw
        and np.frombuffer(raw, np.dtype("u4").newbyteorder(kind.byteorder)).max() > _LAST_CHARACTER
    ):
        raise _Refused("an array of text has values that are not Unicode characters")
    made: np.ndarray[Any, Any] = np.ndarray(shape, kind, buffer=bytearray(raw), order="F" if order else "C")
    return made


def _array(kind: Any, shape: Any, code: Any) -> Pending:
    if kind is not ARRAY_CALLS["numpy.ndarray"] or shape != (0,) or code != b"b":
        raise _Refused(f"an array is made of {described(kind)}, expected numpy.ndarray, empty")

    def build(state: Any) -> np.ndarray[Any, Any]:
        if type(state) is not tuple or len(state) != 5 or state[0] != 1:
            raise _Refused(f"an array's state is {described(state)}, expected version, shape, dtype, order and bytes")
        _, shape, dtype, order, raw = state
        return _values(dtype, shape, raw, order)

    return Pending("an array", build)


def _scalar(kind: Any, raw: Any = None) -> Any:
    return _values(kind, (), raw)[()]


def _no_array(*args: Any) -> Any:
    raise _Refused(f"it makes a numpy.ndarray of {len(args)} values, expected an array made of bytes")


# A pickle contains the name of the module that had these functions in the NumPy version that wrote it.
ARRAY_CALLS = {
    "numpy.dtype": Call("numpy.dtype", _dtype),
    "numpy.ndarray": Call("numpy.ndarray", _no_array),
    **{
        f"{module}.{name}": Call(f"numpy's {name}", make)
        for module in ("numpy._core.multiarray", "numpy.core.multiarray")
        for name, make in (("_reconstruct", _array), ("scalar", _scalar))
    },
}
