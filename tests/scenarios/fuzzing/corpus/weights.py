"""Bad folders of Hugging Face's weights, each made by a few lines: indices, configs and files of safetensors."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["WEIGHTS", "good_weights", "safetensors_file"]

_INDEX, _FILE = "model.safetensors.index.json", "model-1.safetensors"
_CONFIG = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 16}
_HEADER = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def good_weights(folder: Path) -> Path:
    """One tensor in one file, its index and a config."""
    folder.mkdir()
    (folder / _FILE).write_bytes(safetensors_file(_HEADER, b"\0" * 8))
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"a": _FILE}}))
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return folder


def safetensors_file(header: Any, content: bytes = b"") -> bytes:
    """A file of a header, which may be bytes, and of what follows it."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + content


def _index(value: Any) -> Callable[[Path], Any]:
    return lambda folder: (folder / _INDEX).write_bytes(
        value if isinstance(value, bytes) else json.dumps(value).encode()
    )


def _map(value: Any) -> Callable[[Path], Any]:
    return _index({"weight_map": value})


def _config(value: Any) -> Callable[[Path], Any]:
    raw = value if isinstance(value, bytes) else json.dumps(_CONFIG | value).encode()
    return lambda folder: (folder / "config.json").write_bytes(raw)


def _tensor(**fields: Any) -> Callable[[Path], Any]:
    raw = safetensors_file({"a": _HEADER["a"] | fields}, b"\0" * 8)
    return lambda folder: (folder / _FILE).write_bytes(raw)


def _raw(content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / _FILE).write_bytes(content)


def _instead(name: str, make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


WEIGHTS: dict[str, Callable[[Path], Any]] = {
    "index entry outside": _map({"a": "../model-1.safetensors"}),
    "index entry by its whole path": _map({"a": "/etc/passwd"}),
    "index entry in a folder": _map({"a": "x/model-1.safetensors"}),
    "index entry called ..": _map({"a": ".."}),
    "index entry of a number": _map({"a": 7}),
    "index entry of a dict": _map({"a": {"b": "c"}}),
    "index entry of nothing": _map({"a": ""}),
    "index entry of null": _map({"a": None}),
    "index entry with a zero byte": _map({"a": "a\0b"}),
    "index entry of a long name": _map({"a": "x" * 10**6}),
    "index entry of another file": _map({"a": "other.safetensors"}),
    "index entry of another tensor": _map({"b": _FILE}),
    "index entry that is the config": _map({"a": "config.json"}),
    "index of a list": _map(["a"]),
    "index of a number": _map(7),
    "index without a map": _index({}),
    "index that is a list": _index([]),
    "index of many lists": _index(b'{"weight_map":' + b"[]," * 4_000_000 + b"}"),
    "index of many dicts": _index(b'{"weight_map":' + b"{}," * 4_000_000 + b"}"),
    "index of many numbers": _index(
        b'{"weight_map":{' + b",".join(b'"%d":1.5' % number for number in range(1_000_000)) + b"}}"
    ),
    "index nested deep": _index(b'{"a":' * 500_000),
    "index of a wide text": _index(
        json.dumps({"weight_map": "\U0001f600" + "x" * 15 * 2**20}, ensure_ascii=False).encode()
    ),
    "index that is too long": _index(b" " * (2**24 + 1)),
    "index of no text": _index(b"\xff" * 100),
    "index of digits": _index(b'{"weight_map":' + b"9" * 10**6 + b"}"),
    "index that is a pipe": _instead(_INDEX, os.mkfifo),
    "index that is a device": _instead(_INDEX, lambda path: path.symlink_to("/dev/zero")),
    "config of another file": _config({"configuration_files": ["config.4.0.0.json"]}),
    "file that is a pipe": _instead(_FILE, os.mkfifo),
    "file that is a device": _instead(_FILE, lambda path: path.symlink_to("/dev/zero")),
    "file that is a folder": _instead(_FILE, Path.mkdir),
    "file that is empty": _raw(b""),
    "header of 2**63 bytes": _raw(struct.pack("<Q", 2**63) + b"{}"),
    "header beyond the file": _raw(struct.pack("<Q", 10**7) + b"{}"),
    "header of 60 MB": _raw(safetensors_file(b" " * 60_000_000)),
    "header nested deep": _raw(safetensors_file(b'{"a":' + b"[" * 10**6)),
    "header of no JSON": _raw(safetensors_file(b"\xff" * 100)),
    "header of many dimensions": _raw(
        safetensors_file({"a": {"dtype": "F32", "shape": [1] * 2_000_000, "data_offsets": [0, 4]}}, b"\0" * 4)
    ),
    "header without the tensor": _raw(safetensors_file({})),
    "tensor beyond the file": _tensor(data_offsets=[0, 800], shape=[200]),
    "tensor before the file": _tensor(data_offsets=[-8, 0]),
    "tensor backwards": _tensor(data_offsets=[8, 0]),
    "tensor of another size": _tensor(shape=[3]),
    "tensor of a negative size": _tensor(shape=[-2]),
    "tensor of a size beyond 64 bits": _tensor(shape=[2**62, 8]),
    "tensor of no elements and a size beyond 63 bits": _tensor(shape=[2**63, 0], data_offsets=[0, 0]),
    "tensor of another type": _tensor(dtype="F33"),
    "tensor of text": _tensor(shape="2", data_offsets="08"),
    "config of a list": _config(b"[]"),
    "config of a number": _config(b"7"),
    "config of no JSON": _config(b"{"),
    "config nested deep": _config(b'{"a":' * 100_000),
    "config nested deep and whole": _config(b'{"a":' * 500 + b"1" + b"}" * 500),
    "config that is too long": _config(b'{"a":"' + b"x" * 2**21 + b'"}'),
    "config of a thousand million layers": _config({"num_hidden_layers": 10**9}),
    "config of a thousand million labels": _config({"num_labels": 10**9}),
    "config of attention of many layers": _config(
        {"model_type": "gpt_neo", "attention_types": [[["global"], 4_000_000]]}
    ),
    "config of a large number": _config({"vocab_size": 10**30}),
    "config of no known model": _config({"model_type": "../x"}),
    "config of a model of a number": _config({"model_type": 7}),
    "config of a model of a list": _config({"model_type": ["llama"]}),
    "config of layers of text": _config({"num_hidden_layers": "x"}),
    "config of layers of null": _config({"layer_types": 7, "rope_scaling": 7}),
    "config of labels of a list": _config({"id2label": [1, 2]}),
    "config of a quantisation of a number": _config({"quantization_config": 7}),
    "config of a dtype of no name": _config({"dtype": "system", "torch_dtype": {"a": 1}}),
    "config that is a pipe": _instead("config.json", os.mkfifo),
    "config that is a device": _instead("config.json", lambda path: path.symlink_to("/dev/zero")),
}
