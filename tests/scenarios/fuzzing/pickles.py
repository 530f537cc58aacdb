"""Pickles and files of ``torch.save`` put together by hand: what no honest writer would put there."""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Build", "Get", "Global", "New", "Persistent", "Put", "Raw", "Reduce", "assemble", "body", "torch_file"]


@dataclass(frozen=True)
class Global:
    """A class or function, by its full name."""

    name: str


@dataclass(frozen=True)
class Reduce:
    """A call of a function."""

    function: Any
    args: Any = ()


@dataclass(frozen=True)
class New:
    """An instance of a class, made by its ``__new__``."""

    kind: Any
    args: Any = ()


@dataclass(frozen=True)
class Build:
    """An object, and the state that it is given."""

    value: Any
    state: Any


@dataclass(frozen=True)
class Persistent:
    """What the reader finds by an id: a storage."""

    key: Any


@dataclass(frozen=True)
class Put:
    """A value, and its number in the memo."""

    number: int
    value: Any


@dataclass(frozen=True)
class Get:
    """What has a number in the memo."""

    number: int


@dataclass(frozen=True)
class Raw:
    """Opcodes as they are, which leave one object on the stack."""

    opcodes: bytes


def assemble(value: Any, protocol: int = 2) -> bytes:
    """A whole pickle that makes *value*, which may hold the classes of this module."""
    return pickle.PROTO + bytes([protocol]) + body(value) + pickle.STOP


def body(value: Any) -> bytes:
    """The opcodes that leave *value* on the stack."""
    match value:
        case Raw():
            return value.opcodes
        case Global():
            module, _, name = value.name.rpartition(".")
            return pickle.GLOBAL + f"{module}\n{name}\n".encode()
        case Reduce():
            return body(value.function) + body(value.args) + pickle.REDUCE
        case New():
            return body(value.kind) + body(value.args) + pickle.NEWOBJ
        case Build():
            return body(value.value) + body(value.state) + pickle.BUILD
        case Persistent():
            return body(value.key) + pickle.BINPERSID
        case Put():
            return body(value.value) + pickle.LONG_BINPUT + struct.pack("<I", value.number)
        case Get():
            return pickle.LONG_BINGET + struct.pack("<I", value.number)
        case tuple():
            return pickle.MARK + b"".join(map(body, value)) + pickle.TUPLE
        case list():
            return pickle.EMPTY_LIST + pickle.MARK + b"".join(map(body, value)) + pickle.APPENDS
        case dict():
            pairs = b"".join(body(key) + body(one) for key, one in value.items())
            return pickle.EMPTY_DICT + pickle.MARK + pairs + pickle.SETITEMS
        case bytes():
            return body(Reduce(Global("_codecs.encode"), (value.decode("latin1"), "latin1")))
    # A plain value: its pickle without protocol, memo and end.
    return pickletools.optimize(pickle.dumps(value, 2))[2:-1]


def torch_file(
    pickled: bytes, storages: Mapping[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED
) -> bytes:
    """The file that ``torch.save`` would write of a pickle and its storages."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        for key, content in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", content)
        archive.writestr("archive/version", b"3\n")
    return buffer.getvalue()
