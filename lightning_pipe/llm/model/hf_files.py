"""Files of a folder of Hugging Face's, checked before anything is made of them: sizes, types, names and numbers.

Tested in ``tests/llm/model/test_hf_weights.py``.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from lightning_pipe.checkpoints.inert_values import described
from lightning_pipe.engine import SetupError

__all__ = ["check_header", "read_bounded_config", "read_index"]

# Bytes of an index, as of 180,000 tensors, and its names and values.
_INDEX, _ENTRIES = 2**24, 500_000
_CONFIG, _HEADER = 2**20, 2**23
# Of a config: levels, what lists or buffers are made of before weights are compared (layers, a head's width), and any
# other number.
_COUNTS = ("num_", "n_layer", "head_dim")
_LEVELS, _COUNT, _NUMBER = 32, 2**16, 2**31


def read_index(path: Path) -> dict[str, str]:
    """The files of tensors by the tensors' names.

    Args:
        path: of ``model.safetensors.index.json``.

    Raises:
        SetupError: it is no index, or names something else than files of its folder.
    """
    raw = _read(path, _INDEX)
    # Parsed JSON may take many times the memory of its text. An index has no lists and few dicts.
    if raw.count(b"[") or raw.count(b"{") > 1000 or raw.count(b":") > _ENTRIES:
        raise SetupError(
            f"{str(path)!r} is no index of weights: it has lists, many dicts, or more than {_ENTRIES} entries"
        )
    files = _parsed(path, raw).get("weight_map")
    if not isinstance(files, dict):
        raise SetupError(f"{str(path)!r} is no index of weights: weight_map is {described(files)}, expected a dict")
    for name, file in files.items():
        field = f"weight_map[{described(name)}]"
        if not isinstance(file, str):
            raise SetupError(
                f"{str(path)!r} is no index of weights: {field} is {described(file)}, expected a file's name"
            )
        if Path(file).name != file or not file or "\0" in file or len(file) > 255:
            raise SetupError(
                f"{str(path)!r} is refused: {field} is {described(file)}, which is not in its folder. Copy or download"
                " the folder again"
            )
    return files


def read_bounded_config(path: Path) -> dict[str, Any]:
    """A model's config.

    Args:
        path: of ``config.json``.

    Raises:
        SetupError: it is no dict, or has numbers that no model has.
    """
    config = _parsed(path, _read(path, _CONFIG))
    _check_numbers(path, "", config, _LEVELS)
    if "configuration_files" in config:
        raise SetupError(
            f"{str(path)!r} cannot be used: 'configuration_files' names other configs, expected all in this one; leave"
            " it out"
        )
    return config


def _check_numbers(path: Path, name: str, value: Any, levels: int) -> None:
    if levels == 0:
        raise SetupError(f"{str(path)!r} cannot be used: it is nested more than {_LEVELS} levels deep")
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else ((name, one) for one in value)
        for key, one in pairs:
            _check_numbers(path, key, one, levels - 1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        # GPT-Neo counts layers in attention_types.
        most = _COUNT if name.startswith((*_COUNTS, "attention_types")) or "layers" in name else _NUMBER
        if isinstance(value, int) and not -_NUMBER <= value <= most:
            raise SetupError(
                f"{str(path)!r} cannot be used: {described(name)} is {described(value)}, expected at most {most:,}"
            )
    elif value is not None and name.startswith(_COUNTS):
        raise SetupError(f"{str(path)!r} cannot be used: {described(name)} is {described(value)}, expected a number")


def check_header(path: Path) -> None:
    """Check that a file of safetensors is a file, and that its header is no longer than it and than is read at once.

    Raises:
        OSError: it cannot be read.
        SetupError: it is something else.
    """
    size = _size(path)
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        most = min(max(size - 8, 0), _HEADER)
        if size < 8 or length > most:
            raise SetupError(
                f"{str(path)!r} cannot be read: its header has {length} bytes, expected at most {most}. Copy or"
                " download it again"
            )
        if stream.read(length).count(b",") > _ENTRIES:
            raise SetupError(f"{str(path)!r} cannot be read: its header has more than {_ENTRIES} fields and dimensions")


def _size(path: Path) -> int:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise SetupError(f"{str(path)!r} cannot be read: it is a folder, a pipe or a device, expected a file")
    return status.st_size


def _read(path: Path, most: int) -> bytes:
    try:
        size = _size(path)
        if size > most:
            raise SetupError(f"{str(path)!r} cannot be read: it has {size} bytes, expected at most {most}")
        return path.read_bytes()
    except OSError as error:
        raise SetupError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error


def _parsed(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise SetupError(
            f"{str(path)!r} cannot be read: it is no JSON ({str(error)[:200]}). Copy or download it again"
        ) from None
    if not isinstance(found, dict):
        raise SetupError(f"{str(path)!r} cannot be read: it holds {described(found)}, expected a dict")
    return found
