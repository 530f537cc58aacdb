"""Bad files of checkpoint folders, each made by a few lines: ``meta.pt``, ``.metadata``, and what they name."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.scenarios.fuzzing.pickles import (
    Build,
    Get,
    Global,
    New,
    Persistent,
    Put,
    Raw,
    Reduce,
    assemble,
    body,
    torch_file,
)

__all__ = ["FILES", "FOLDERS", "good_folder"]


def good_folder(folder: Path) -> Path:
    """A checkpoint of stages, as one process writes it: two tensors, a number, an optimiser's state."""
    state = {
        "state_dict": {"model.a": torch.arange(12.0).view(3, 4), "model.b": torch.ones(5, dtype=torch.int64)},
        "optimizer_0": {"state": {"model.a": {"step": 3, "momentum": torch.zeros(3, 4)}}},
    }
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    groups = [{"lr": 0.1, "params": ["model.a"]}]
    torch.save({"epoch": 1, "optimizer_states": [{"param_groups": groups}]}, folder / "meta.pt")
    return folder


# ---------------------------------------------------------------------- files of torch.save

_BYTES = (3, "|", None, None, None, 16, 1, 0)


def _dtype(name: str, *state: Any, number: int = 0) -> Build:
    return Build(Put(number, Reduce(Global("numpy.dtype"), (name, False, True))), state)


def _array(shape: Any, dtype: Any, raw: Any, order: Any = False, module: str = "numpy.core.multiarray") -> Build:
    empty = Reduce(Global(f"{module}._reconstruct"), (Global("numpy.ndarray"), (0,), b"b"))
    return Build(empty, (1, shape, dtype, order, raw))


def _storage(count: Any = 4, kind: str = "torch.FloatStorage", key: Any = "0") -> Persistent:
    return Persistent(("storage", Global(kind), key, "cpu", count))


_HOOKS = Reduce(Global("collections.OrderedDict"))


def _tensor(offset: Any, size: Any, stride: Any, storage: Any = None, function: str = "_rebuild_tensor_v2") -> Reduce:
    return Reduce(Global(f"torch._utils.{function}"), (storage or _storage(), offset, size, stride, False, _HOOKS))


def _saved(value: Any, content: bytes = b"\0" * 16, compression: int = zipfile.ZIP_STORED) -> bytes:
    return torch_file(assemble(value), {"0": content}, compression)


def _nested(opcodes: bytes, count: int) -> Raw:
    return Raw(pickle.NONE + opcodes * count)


def _laughs() -> list[Any]:
    """Ten lists, each of ten of the one before: 10**10 when they are walked."""
    value: Any = Put(0, [])
    for number in range(1, 20):
        value = Put(number, [value, *[Get(number - 1)] * 9])
    return [value]


def _of_class(**attributes: Any) -> Reduce:
    """A tensor with attributes."""
    args = (_storage(), 0, (4,), (1,), False, _HOOKS)
    return Reduce(
        Global("torch._tensor._rebuild_from_type_v2"),
        (Global("torch._utils._rebuild_tensor_v2"), Global("torch.Tensor"), args, attributes),
    )


def _pairs_of_one_hash(count: int) -> dict[Any, int]:
    """Pairs of integers that a dict cannot tell apart by their hashes.

    Python's hash of a tuple is xxHash's, whose last step can be inverted.
    """
    size, (first, second, fifth) = 2**64, (11400714785074694791, 14029467366897019727, 2870177450012600261)
    found: dict[Any, int] = {}
    number = 0
    while len(found) < count:
        number += 1
        lane = (fifth + number * second) % size
        lane = ((lane << 31) | (lane >> 33)) % size * first % size
        other = (12345 - lane) * pow(second, -1, size) % size
        other -= size if other >= 2**63 else 0
        if abs(other) < 2**61 - 1:
            found[number, other] = 0
    return found


_F8 = _dtype("f8", 3, "<", None, None, None, -1, -1, 0)
_S16 = _dtype("S16", *_BYTES)

FILES: dict[str, Callable[[], bytes]] = {
    # A state that grows a dtype when an array of it is there: reads 64 KB of the heap, and 2 GB.
    "dtype grown": lambda: _saved([_array((1,), _S16, b"x" * 16), Build(Get(0), (*_BYTES[:5], 65536, 1, 0))]),
    "dtype grown far": lambda: _saved([_array((1,), _S16, b"x" * 16), Build(Get(0), (*_BYTES[:5], 2**31 - 1, 1, 0))]),
    "dtype of another size": lambda: _saved(_array((1,), _dtype("S16", *_BYTES[:5], 65536, 1, 0), b"x" * 16)),
    # Bytes that are taken for the addresses of objects.
    "dtype with objects": lambda: _saved(_array((2,), _dtype("S16", *_BYTES[:7], 0x3F), b"A" * 32)),
    "dtype of objects": lambda: _saved(_array((2,), _dtype("O", 3, "|", None, None, None, -1, -1, 63), b"A" * 16)),
    "dtype with a pickled list": lambda: _saved(_array((1,), _dtype("S16", *_BYTES[:7], 2), [b"y" * 1000])),
    "dtype with a sub-array": lambda: _saved(
        _array((1,), _dtype("S16", 3, "|", (_F8, (125,)), None, None, 16, 1, 0), b"y" * 16)
    ),
    "dtype with fields": lambda: _saved(
        _array((1,), _dtype("V8", 3, "|", None, ("a",), {"a": (_F8, 1000)}, 8, 1, 0), b"y" * 8)
    ),
    "dtype of dates": lambda: _saved(
        _array((1,), _dtype("M8", 4, "<", None, None, None, -1, -1, 0, ({}, (b"D", 0, 0, 0))), b"y" * 8)
    ),
    "dtype of no order": lambda: _saved(_array((1,), _dtype("f8", 3, "x", None, None, None, -1, -1, 0), b"y" * 8)),
    "dtype of a text as long as memory": lambda: _saved(_array((1,), _dtype("U999999999999", *_BYTES), b"y" * 8)),
    "dtype without a state": lambda: _saved([Reduce(Global("numpy.dtype"), ("f8", False, True))]),
    "array without a state": lambda: _saved([_array((1,), _F8, b"y" * 8).value]),
    "array with memory that nobody wrote": lambda: _saved(
        Reduce(Global("numpy.core.multiarray._reconstruct"), (Global("numpy.ndarray"), (65536,), b"b"))
    ),
    "array made of a shape": lambda: _saved(Reduce(Global("numpy.ndarray"), ((10**7,),))),
    "array with too few bytes": lambda: _saved(_array((1000,), _F8, b"y" * 8)),
    "array of a negative shape": lambda: _saved(_array((-1,), _F8, b"y" * 8)),
    "array of a shape beyond 64 bits": lambda: _saved(_array((2**62, 4, 0), _F8, b"")),
    "array of new names": lambda: _saved(_array((2**40,), _F8, b"y" * 8, True, "numpy._core.multiarray")),
    "array with a list as bytes": lambda: _saved(_array((1,), _F8, [1.0])),
    "array of truth that is neither": lambda: _saved(
        _array((2,), _dtype("b1", 3, "|", None, None, None, -1, -1, 0), b"\x07\x09")
    ),
    "array of text that is none": lambda: _saved(
        _array((1,), _dtype("U1", 3, "<", None, None, None, 4, 4, 8), b"\xff\xff\xff\x7f")
    ),
    "scalar of another size": lambda: _saved(Reduce(Global("numpy.core.multiarray.scalar"), (_F8, b"y" * 4))),
    "scalar of nothing": lambda: _saved(Reduce(Global("numpy.core.multiarray.scalar"), (_F8,))),
    "frombuffer": lambda: _saved(Reduce(Global("numpy.frombuffer"), (b"y" * 8, "f8"))),
    "array of many texts without a character": lambda: _saved(
        _array((2**40,), _dtype("S0", 3, "|", None, None, None, 0, 1, 0), b"")
    ),
    # Keys of one hash.
    "keys that are pairs of one hash": lambda: _saved(_pairs_of_one_hash(8_000)),
    "names that write on a terminal": lambda: _saved(Global("os\x1b[31m\r.sys\u202etem")),
    # Tensors.
    "tensor that says where an array is": lambda: _saved(
        _of_class(__array_interface__={"data": (0xDEAD0000, False), "shape": (4,), "typestr": "<f4", "version": 3})
    ),
    "tensor with memory that nobody wrote": lambda: _saved(Reduce(Global("torch.Tensor"), (65536,))),
    "tensor of a class": lambda: _saved(New(Global("torch.Tensor"), (2**34,))),
    "tensor beyond its storage": lambda: _saved(_tensor(0, (2**30,), (1,))),
    "tensor beside its storage": lambda: _saved(_tensor(2**40, (1,), (1,))),
    "tensor before its storage": lambda: _saved(_tensor(-4, (1,), (1,))),
    "tensor of a negative stride": lambda: _saved(_tensor(3, (4,), (-1,))),
    "tensor of a negative size": lambda: _saved(_tensor(0, (-4,), (1,))),
    "tensor of one value, a million million times": lambda: _saved(_tensor(0, (10**12,), (0,))),
    "tensor of a size beyond 64 bits": lambda: _saved(_tensor(0, (2**62, 2**62, 0), (0, 0, 0))),
    "tensor of text": lambda: _saved(_tensor("0", "12", "1")),
    "tensor of a dtype that is none": lambda: _saved(
        Reduce(Global("torch._utils._rebuild_tensor_v3"), (_storage(), 0, (1,), (1,), False, _HOOKS, "torch.float32"))
    ),
    "tensor of truth that is neither": lambda: _saved(
        _tensor(0, (16,), (1,), _storage(16, "torch.BoolStorage")), b"\7" * 16
    ),
    "tensor that hides a method": lambda: _saved(
        Reduce(
            Global("torch._tensor._rebuild_from_type_v2"),
            (
                Global("torch._utils._rebuild_tensor_v2"),
                Global("torch.Tensor"),
                _tensor(0, (4,), (1,)).args,
                {"size": 1},
            ),
        )
    ),
    "sparse tensor of indices beyond it": lambda: _saved(
        Reduce(
            Global("torch._utils._rebuild_sparse_tensor"),
            (
                Reduce(Global("torch.serialization._get_layout"), ("torch.sparse_coo",)),
                (_tensor(0, (1, 2), (2, 1), _storage(2, "torch.LongStorage")), _tensor(0, (2,), (1,)), (1,), True),
            ),
        ),
        struct.pack("<2q", 10**9, -(10**9)),
    ),
    "quantised tensor": lambda: _saved(
        Reduce(
            Global("torch._utils._rebuild_qtensor"),
            (
                _storage(16, "torch.QInt8Storage"),
                0,
                (4,),
                (1,),
                (Global("torch.per_tensor_affine"), 0.1, 0),
                False,
                _HOOKS,
            ),
        )
    ),
    "nested tensor": lambda: _saved(
        Reduce(Global("torch._utils._rebuild_nested_tensor"), (_tensor(0, (4,), (1,)),) * 4)
    ),
    "meta tensor": lambda: _saved(
        Reduce(Global("torch._utils._rebuild_meta_tensor_no_storage"), (Global("torch.float32"), (2**60,), (1,), False))
    ),
    "storage of a count beyond the file": lambda: _saved(_tensor(0, (4,), (1,), _storage(10**9))),
    "storage of no file": lambda: _saved(_tensor(0, (4,), (1,), _storage(4, key="../data.pkl"))),
    "storage without an end": lambda: _saved(Persistent(("storage",))),
    "storage by a number": lambda: _saved(Persistent(7)),
    "state of an OrderedDict that hides a method": lambda: _saved(Build(_HOOKS, {"items": 1})),
    # Objects that are larger than what they are made of.
    "bytearray of a gigabyte": lambda: _saved(Reduce(Global("builtins.bytearray"), (2**30,))),
    "bytes again and again": lambda: _saved(
        [Put(0, "x" * 10**6), *[Reduce(Global("_codecs.encode"), (Get(0), "latin1"))] * 2000]
    ),
    "text that is four times as long": lambda: _saved("\U0001f600" + "x" * (50 * 2**20)),
    "tuples that overflow the stack as a key": lambda: _saved(
        Raw(pickle.EMPTY_DICT + body(_nested(pickle.TUPLE1, 300_000)) + pickle.NONE + pickle.SETITEM)
    ),
    "lists in lists": lambda: _saved(Raw(pickle.EMPTY_LIST * 100_000 + pickle.APPEND * 99_999)),
    "a list that holds itself": lambda: _saved(Put(0, [Raw(body(Put(0, [])) + body(Get(0)) + pickle.APPEND)])),
    "ten lists of ten": lambda: _saved(_laughs()),
    "keys of one hash": lambda: _saved({number * (2**61 - 1): None for number in range(2000)}),
    "opcodes without end": lambda: _saved(Raw(pickle.EMPTY_DICT * 20_000_000)),
    "memo without end": lambda: _saved(Raw(pickle.NONE + pickle.MEMOIZE * 20_000_000)),
    "memo of a large index": lambda: _saved(Raw(pickle.NONE + pickle.LONG_BINPUT + b"\xff\xff\xff\x7f")),
    "a long integer": lambda: _saved(Raw(pickle.LONG4 + struct.pack("<i", 10**6) + b"\x7f" * 10**6)),
    "an integer of digits": lambda: _saved(Raw(pickle.INT + b"9" * 10**6 + b"\n")),
    "a frame beyond the file": lambda: _saved(Raw(pickle.FRAME + b"\xff" * 8 + pickle.NONE)),
    "bytes beyond the file": lambda: _saved(Raw(pickle.BINBYTES8 + struct.pack("<Q", 2**40))),
    "a bytearray beyond the file": lambda: _saved(Raw(pickle.BYTEARRAY8 + struct.pack("<Q", 2**40))),
    "a call of a call": lambda: _saved(Reduce(Reduce(Global("torch.device"), ("cpu",)), ())),
    "a name of a megabyte": lambda: _saved(Global("torch." + "x" * 10**6)),
    "a name on the stack of a megabyte": lambda: _saved(Raw(body("torch") + body("x" * 10**6) + pickle.STACK_GLOBAL)),
    "a class that torch registers": lambda: _saved(
        Reduce(Global("torch.distributed.device_mesh.DeviceMesh"), ("cpu", [0]))
    ),
    "a function of tensordict": lambda: _saved(
        Reduce(Global("tensordict.utils._rebuild_tensordict_files_consolidated"), ("/etc/passwd",))
    ),
    # Archives.
    "no archive": lambda: b"\0" * 1000,
    "nothing": lambda: b"",
    "a pickle": lambda: pickle.dumps(1),
    "zip bomb": lambda: _saved({"x": 1}, b"\0" * (64 * 2**20), zipfile.ZIP_DEFLATED),
    "zip in a zip": lambda: _zip({"archive/inner.zip": _saved({"x": 1})}),
    "no pickle in it": lambda: _zip({"archive/version": b"3"}),
    "two pickles in it": lambda: _zip({"a/data.pkl": assemble(1), "b/data.pkl": assemble(1)}),
    "an entry longer than the file": lambda: _patched(b"PK\1\2", 20, struct.pack("<2I", 2**31, 2**31)),
    "an entry beyond the file": lambda: _patched(b"PK\1\2", 42, struct.pack("<I", 2**31)),
    "entries without end": lambda: _patched(b"PK\5\6", 8, struct.pack("<2H2I", 65535, 65535, 2**31, 0)),
    "entries in one place": lambda: _overlapping(),
    "200,000 entries": lambda: _crowded(),
    "cut": lambda: _saved({"x": 1})[:-30],
    "another byte order": lambda: _zip({"archive/data.pkl": assemble(1), "archive/byteorder": b"big"}),
}


def _zip(entries: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _overlapping() -> bytes:
    """A list of entries in which each of 200 is the same 100,000 bytes."""
    file = _zip({"archive/data.pkl": assemble(1), "archive/data/0": b"\0" * 100_000})
    first = file.index(b"PK\1\2")
    second = file.index(b"PK\1\2", first + 1)
    end = file.index(b"PK\5\6")
    entries = file[first:second] + b"".join(file[second : end - 1] + struct.pack("<B", number) for number in range(200))
    return file[:first] + entries + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 201, 201, len(entries), first, 0)


def _crowded() -> bytes:
    """An archive that is nothing but a list of entries, of which the zip module makes objects."""
    entry = struct.pack("<4s6H3L5H2L", b"PK\1\2", *[20] * 2, *[0] * 14)
    entries = entry * 200_000
    return entries + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, len(entries), 0, 0)


def _patched(mark: bytes, offset: int, content: bytes) -> bytes:
    """A good file, of which a record has other numbers."""
    file = bytearray(_saved({"x": 1}))
    place = file.index(mark) + offset
    file[place : place + len(content)] = content
    return bytes(file)


# ---------------------------------------------------------------------- folders


def _changed(folder: Path, change: Callable[[Any], Any]) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps(change(metadata) or metadata))


def _with(field: str, value: Any) -> Callable[[Path], Any]:
    return lambda folder: _changed(folder, lambda metadata: setattr(metadata, field, value))


def _path(value: Any) -> Callable[[Path], Any]:
    def change(metadata: Any) -> None:
        metadata.planner_data["state_dict.model.a"] = value

    return lambda folder: _changed(folder, change)


def _info(**fields: Any) -> Callable[[Path], Any]:
    """Another place for the first tensor's bytes."""

    def change(metadata: Any) -> None:
        for name, value in fields.items():
            setattr(metadata.storage_data[MetadataIndex("state_dict.model.a", [0, 0])], name, value)

    return lambda folder: _changed(folder, change)


def _entry(size: Any, chunks: Any, dtype: Any = torch.float32) -> Callable[[Path], Any]:
    """Another size for the first tensor."""

    def change(metadata: Any) -> None:
        pieces = [ChunkStorageMetadata(*one) if isinstance(one, tuple) else one for one in chunks]
        properties = TensorProperties(dtype=dtype) if isinstance(dtype, torch.dtype) else dtype
        metadata.state_dict_metadata["state_dict.model.a"] = TensorStorageMetadata(properties, size, pieces)

    return lambda folder: _changed(folder, change)


def _with_a_gap(folder: Path) -> None:
    """Two pieces of the first tensor that overlap, and have as many elements as it has; its last row is in neither."""

    def change(metadata: Any) -> None:
        name, second = "state_dict.model.a", _SIZE([0, 1])
        info = metadata.storage_data[MetadataIndex(name, [0, 0])]
        data = folder / info.relative_path
        raw = data.read_bytes()
        data.write_bytes(raw + raw[info.offset : info.offset + info.length])
        metadata.storage_data[MetadataIndex(name, second)] = replace(info, offset=len(raw))
        pieces = [ChunkStorageMetadata(_AT, _SIZE([2, 4])), ChunkStorageMetadata(second, _SIZE([2, 3]))]
        entry = metadata.state_dict_metadata[name]
        metadata.state_dict_metadata[name] = TensorStorageMetadata(entry.properties, entry.size, pieces)

    _changed(folder, change)


def _pickled(make: Callable[[], bytes]) -> Callable[[Path], Any]:
    return lambda folder: (folder / ".metadata").write_bytes(make())


def _instead(name: str, make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Something else in the place of a file, whose content is outside."""

    def change(folder: Path) -> None:
        os.replace(folder / name, folder.with_name(f"{folder.name}-outside"))
        make(folder / name)

    return change


def _linked(path: Path) -> None:
    path.symlink_to(path.parent.with_name(f"{path.parent.name}-outside"))


def _rest(value: Any) -> Callable[[Path], Any]:
    return lambda folder: torch.save(value, folder / "meta.pt")


def _many_paths(metadata: Any) -> None:
    """Lists that are each as long as there are values."""
    for number in range(300):
        name = f"state_dict.x{number}"
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(name)] = metadata.storage_data[
            MetadataIndex("optimizer_0.state.model.a.step")
        ]
        metadata.planner_data[name] = ("state_dict", f"x{number}", 300)


_SIZE, _AT = torch.Size, torch.Size([0, 0])
_DATA = "__0_0.distcp"
FOLDERS: dict[str, Callable[[Path], Any]] = {
    "memo bomb": _pickled(lambda: b"\x80\x04Nr\xff\xff\xff\x10."),
    "memo without end": _pickled(lambda: b"\x80\x04N" + pickle.MEMOIZE * 20_000_000),
    "dicts without end": _pickled(lambda: b"\x80\x04" + pickle.EMPTY_DICT * 20_000_000),
    "a call": _pickled(lambda: assemble(Reduce(Global("os.system"), ("true",)))),
    "a dtype of numpy": _pickled(lambda: assemble(Build(Reduce(Global("numpy.dtype"), ("S16", False, True)), _BYTES))),
    "another object": _pickled(lambda: pickle.dumps(1)),
    "a class without fields": _pickled(lambda: assemble(New(Global(f"{dcp.Metadata.__module__}.Metadata")))),
    "a class with a number as fields": _pickled(
        lambda: assemble(Build(New(Global(f"{dcp.Metadata.__module__}.Metadata")), 1))
    ),
    "nothing": _pickled(lambda: b""),
    "path index": _path(("state_dict", "model.a", 150_000_000)),
    "path index below zero": _path(("state_dict", "model.a", -5)),
    "path index of 4,000 bits": _path(("state_dict", "model.a", 1 << 2000)),
    "path of a number": _path(7),
    "path of nothing": _path(()),
    "path of a float": _path(("state_dict", 1.5)),
    "path of a list": _path(["state_dict", "model.a"]),
    "path that is short": _path(("state_dict",)),
    "path that is long": _path(("state_dict", *["x"] * 100_000)),
    "path in the place of another": _path(("state_dict", "model.b")),
    "path in a value": _path(("state_dict", "model.b", "x")),
    "path in a value by number": _path(("optimizer_0", "state", "model.a", "momentum", 0)),
    "path in a dict by number": _path(("optimizer_0", "state", 0)),
    "paths that make long lists": lambda folder: _changed(folder, _many_paths),
    "planner data of a list": _with("planner_data", [1, 2]),
    "planner data of text": _with("planner_data", "state_dict"),
    "planner data of other names": _with("planner_data", {"other": ("state_dict", "other")}),
    "planner data by number": _with("planner_data", {7: ("state_dict", "model.a")}),
    "storage data of nothing": _with("storage_data", None),
    "storage data without entries": _with("storage_data", {}),
    "storage data of text": _with("storage_data", {"state_dict.model.a": "x"}),
    "state of nothing": _with("state_dict_metadata", None),
    "state of text": _with("state_dict_metadata", {"state_dict.model.a": "x"}),
    "file outside": _info(relative_path="../outside"),
    "file by its whole path": _info(relative_path="/etc/passwd"),
    "file called ..": _info(relative_path=".."),
    "file of no name": _info(relative_path=""),
    "file of a number": _info(relative_path=7),
    "file with a zero byte": _info(relative_path="a\0b"),
    "file of a long name": _info(relative_path="x" * 100_000),
    "file that is not there": _info(relative_path="other"),
    "file that is another": _info(relative_path="meta.pt"),
    "offset below zero": _info(offset=-1),
    "offset beyond the file": _info(offset=2**60),
    "offset of text": _info(offset="0"),
    "length below zero": _info(length=-1),
    "length beyond the file": _info(length=2**60),
    "length of nothing": _info(length=0),
    "length of a few bytes": _info(length=60),
    "bytes of another tensor": _info(offset=0),
    "transformed bytes": _info(transform_descriptors=["zstd"]),
    "tensor larger than its pieces": _entry(_SIZE([10**6, 10**6]), [(_AT, _SIZE([3, 4]))]),
    "piece larger than its bytes": _entry(_SIZE([10**6, 10**6]), [(_AT, _SIZE([10**6, 10**6]))]),
    "piece outside": _entry(_SIZE([3, 4]), [(_AT, _SIZE([30, 40]))]),
    "piece of fewer dimensions": _entry(_SIZE([3, 4]), [(_AT, _SIZE([12]))]),
    "piece nowhere": _entry(_SIZE([3, 4]), [(_SIZE([1, 1]), _SIZE([2, 3]))]),
    "piece that is smaller in the file": _entry(_SIZE([12, 4]), [(_AT, _SIZE([12, 4]))]),
    "pieces again and again": _entry(_SIZE([3, 4000]), [(_AT, _SIZE([3, 4]))] * 1000),
    "pieces that overlap and leave a gap": _with_a_gap,
    "no piece": _entry(_SIZE([10**9]), []),
    "pieces of numbers": _entry(_SIZE([3, 4]), [1, 2]),
    "pieces of text": _entry("34", []),
    "size of a list": _entry([3, 4], [(_AT, _SIZE([3, 4]))]),
    "size beyond 64 bits": _entry(_SIZE([2**62, 2**62]), [(_AT, _SIZE([3, 4]))]),
    "dtype of a quantised tensor": _entry(_SIZE([3, 4]), [(_AT, _SIZE([3, 4]))], torch.quint8),
    "properties of text": _entry(_SIZE([3, 4]), [(_AT, _SIZE([3, 4]))], "float32"),
    "data file that is a link out of the folder": _instead(_DATA, _linked),
    "data file that is a pipe": _instead(_DATA, os.mkfifo),
    "data file that is a folder": _instead(_DATA, Path.mkdir),
    "data file that is a device": _instead(_DATA, lambda path: path.symlink_to("/dev/zero")),
    "data file that is not there": _instead(_DATA, lambda path: None),
    "data file that is cut": lambda folder: os.truncate(folder / _DATA, 200),
    "data file of zeros": lambda folder: (folder / _DATA).write_bytes(b"\0" * (folder / _DATA).stat().st_size),
    ".metadata that is a link": _instead(".metadata", _linked),
    ".metadata that is a pipe": _instead(".metadata", os.mkfifo),
    ".metadata that is a folder": _instead(".metadata", Path.mkdir),
    ".metadata that is a device": _instead(".metadata", lambda path: path.symlink_to("/dev/zero")),
    "meta.pt that is a link": _instead("meta.pt", _linked),
    "meta.pt that is a pipe": _instead("meta.pt", os.mkfifo),
    "meta.pt that is a device": _instead("meta.pt", lambda path: path.symlink_to("/dev/zero")),
    "rest of a list": _rest([1]),
    "optimisers of a number": _rest({"optimizer_states": 7}),
    "optimisers of numbers": _rest({"optimizer_states": [7]}),
    "groups of a number": _rest({"optimizer_states": [{"param_groups": 7}]}),
    "groups without names": _rest({"optimizer_states": [{"param_groups": [{"params": [1]}]}]}),
    "groups of other names": _rest({"optimizer_states": [{"param_groups": [{"params": ["other"]}]}]}),
    "tied names of a number": _rest({"lightning_pipe.tied": 7}),
    "tied names of nothing": _rest({"lightning_pipe.tied": {"x": "y"}}),
}
