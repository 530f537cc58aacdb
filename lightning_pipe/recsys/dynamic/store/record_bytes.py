"""Batched conversion of keys and records to and from the byte strings of a key-value store."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_pipe.recsys.dynamic.store.row_store import Keys, Records

# Number of the table, then the key, encoded so that byte order is numeric order: big-endian with the sign bit inverted.
KEY_BYTES = 10
_SIGN = np.uint64(1 << 63)
_KEY = np.dtype([("table", ">u2"), ("key", ">u8")])


def encode_keys(table: int, keys: Keys) -> list[bytes]:
    """Encode each key of the table with this number as a byte string."""
    entries = np.empty(len(keys), _KEY)
    entries["table"] = table
    entries["key"] = keys.view(np.uint64) ^ _SIGN
    return _split_bytes_by_width(entries.tobytes(), KEY_BYTES)


def decode_keys(parts: Sequence[bytes]) -> Keys:
    """Decode the byte strings made by :func:`encode_keys`."""
    entries = np.frombuffer(b"".join(parts), _KEY)
    return (entries["key"].astype(np.uint64) ^ _SIGN).view(np.int64)


def split_records_to_bytes(records: Records) -> list[bytes]:
    """Split an array of bytes into one byte string for each row."""
    return _split_bytes_by_width(records.tobytes(), records.shape[1])


def join_bytes_to_records(parts: Sequence[bytes], width: int) -> Records:
    """Join byte strings into an array with rows of *width* bytes."""
    joined = np.frombuffer(b"".join(parts), np.uint8)
    if len(joined) != len(parts) * width:
        raise ValueError(f"{len(parts)} records have {len(joined)} bytes in total, expected {width} bytes each")
    return joined.reshape(len(parts), width)


def _split_bytes_by_width(joined: bytes, width: int) -> list[bytes]:
    return [joined[begin : begin + width] for begin in range(0, len(joined), width)]
