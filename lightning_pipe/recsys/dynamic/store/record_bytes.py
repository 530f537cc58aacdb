"""Keys and records as the byte strings that stores want, many at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lightning_pipe.recsys.dynamic.store.row_store import Keys, Records

__all__ = ["KEY_BYTES", "join_keys", "join_records", "split_keys", "split_records"]

# The table's number, and the key, which sorts as a number does: big-endian, the sign turned over.
KEY_BYTES = 10
_SIGN = np.uint64(1 << 63)
_KEY = np.dtype([("table", ">u2"), ("key", ">u8")])


def split_keys(table: int, keys: Keys) -> list[bytes]:
    """A byte string for each key of the table with this number."""
    whole = np.empty(len(keys), _KEY)
    whole["table"] = table
    whole["key"] = keys.view(np.uint64) ^ _SIGN
    return _split(whole.tobytes(), KEY_BYTES)


def join_keys(parts: Sequence[bytes]) -> Keys:
    """The keys that :func:`split_keys` made the strings of."""
    whole = np.frombuffer(b"".join(parts), _KEY)
    return (whole["key"].astype(np.uint64) ^ _SIGN).view(np.int64)


def split_records(records: Records) -> list[bytes]:
    """A byte string for each row of an array of bytes."""
    return _split(records.tobytes(), records.shape[1])


def join_records(parts: Sequence[bytes], width: int) -> Records:
    """Rows of *width* bytes.

    Raises:
        ValueError: the strings are not of that width.
    """
    whole = np.frombuffer(b"".join(parts), np.uint8)
    if len(whole) != len(parts) * width:
        raise ValueError(f"{len(parts)} records of {width} bytes have {len(whole)} bytes together")
    return whole.reshape(len(parts), width)


def _split(whole: bytes, width: int) -> list[bytes]:
    return [whole[begin : begin + width] for begin in range(0, len(whole), width)]
