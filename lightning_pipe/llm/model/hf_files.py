"""Readers for the files of a Hugging Face folder, which check sizes, types, names and numbers before use."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.safe_text import shown

# Limits of an index: its size in bytes, enough for about 180,000 tensors, and its number of names and values.
_INDEX, _ENTRIES = 2**24, 500_000
# Limits in bytes of a config and of the header of a safetensors file.
_CONFIG, _HEADER = 2**20, 2**23
# Limits of a config: nesting levels; counts, such as the number of layers or the size of a head, from which lists or
# buffers are built before weights are compared; and all other numbers.
_COUNTS = ("num_", "n_layer", "head_dim")
_LEVELS, _COUNT, _NUMBER = 32, 2**16, 2**31


def read_index(path: Path) -> dict[str, str]:
    """Names of the files that hold tensors, by the name of the tensor."""
    raw = _read(path, _INDEX)
    # Check before parsing, because parsed JSON may take many times the memory of its text. An index has no lists and
    # few dicts.
    if raw.count(b"[") or raw.count(b"{") > 1000 or raw.count(b":") > _ENTRIES:
        raise SetupError(
            f"{str(path)!r} is not an index of weights: it has lists, many dicts, or more than {_ENTRIES} entries. Copy"
            " or download it again"
        )
    files = _parsed(path, raw).get("weight_map")
    if not isinstance(files, dict):
        raise SetupError(
            f"{str(path)!r} is not an index of weights: expected a dict as weight_map, got {shown(files)}. Copy or"
            " download it again"
        )
    for name, file in files.items():
        field = f"weight_map[{shown(name)}]"
        if not isinstance(file, str):
            raise SetupError(
                f"{str(path)!r} is not an index of weights: expected the name of a file as {field}, got"
                f" {shown(file)}. Copy or download it again"
            )
        if Path(file).name != file or not file or "\0" in file or len(file) > 255:
            raise SetupError(
                f"{str(path)!r} cannot be used: expected a file in its folder as {field}, got {shown(file)}. Copy"
                " or download the folder again"
            )
    return files


def read_bounded_config(path: Path) -> dict[str, Any]:
    """Contents of the config of a model."""
    config = _parsed(path, _read(path, _CONFIG))
    _check_numbers(path, "", config, _LEVELS)
    if "configuration_files" in config:
        raise SetupError(
            f"{str(path)!r} cannot be used: 'configuration_files' names other configs, expected all values in this"
            " file. Remove 'configuration_files'"
        )
    return config


def _check_numbers(path: Path, name: str, value: Any, levels: int) -> None:
    if levels == 0:
        raise SetupError(
            f"{str(path)!r} cannot be used: expected at most {_LEVELS} levels of nesting, got more. Copy or download it"
            " again"
        )
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else ((name, one) for one in value)
        for key, one in pairs:
            _check_numbers(path, key, one, levels - 1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        # The config of GPT-Neo has counts of layers in attention_types.
        most = _COUNT if name.startswith((*_COUNTS, "attention_types")) or "layers" in name else _NUMBER
        if isinstance(value, int) and not -_NUMBER <= value <= most:
            raise SetupError(
                f"{str(path)!r} cannot be used: {shown(name)} is {shown(value)}, expected at most {most:,}."
                " Correct the value"
            )
    elif value is not None and name.startswith(_COUNTS):
        raise SetupError(
            f"{str(path)!r} cannot be used: {shown(name)} is {shown(value)}, expected a number. Correct the value"
        )


def check_header(path: Path) -> None:
    """Check that *path* is a regular file, and that its safetensors header fits the file and the limits."""
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
            raise SetupError(
                f"{str(path)!r} cannot be read: its header has more than {_ENTRIES} fields and dimensions. Copy or"
                " download it again"
            )


def _size(path: Path) -> int:
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise SetupError(
            f"{str(path)!r} cannot be read: expected a file, got a folder, a pipe or a device. Replace it with the file"
        )
    return status.st_size


def _read(path: Path, most: int) -> bytes:
    try:
        size = _size(path)
        if size > most:
            raise SetupError(
                f"{str(path)!r} cannot be read: it has {size} bytes, expected at most {most}. Copy or download it again"
            )
        return path.read_bytes()
    except OSError as error:
        raise SetupError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error


def _parsed(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise SetupError(
            f"{str(path)!r} cannot be read: it is not JSON ({str(error)[:200]}). Copy or download it again"
        ) from None
    if not isinstance(found, dict):
        raise SetupError(
            f"{str(path)!r} cannot be read: expected a dict, got {shown(found)}. Copy or download it again"
        )
    return found
