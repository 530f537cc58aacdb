"""Reads a file of ``torch.save``, a zip archive of a pickle and the bytes of storages, without executing the pickle.

Tensors are views of the storages' bytes; NumPy arrays are made of bytes and a dtype from a fixed list. Sizes, strides
and offsets are checked against the number of bytes, and entries of the archive against the file's size and their
checksums. The pickle yields plain values only: see :mod:`lightning_pipe.checkpoints.inert_pickle`.
"""

from __future__ import annotations

import re
import struct
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import torch

from lightning_pipe.checkpoints.inert_calls import ARRAY_CALLS, PLAIN_CALLS
from lightning_pipe.checkpoints.inert_pickle import load_inert
from lightning_pipe.checkpoints.inert_tensors import DTYPES, STORAGE_KINDS, TENSOR_CALLS, TOKENS, InertStorage
from lightning_pipe.checkpoints.inert_values import Call, _Damaged, _Refused, described

# Maximum size in bytes of an archive's central directory. The zip module uses ten times as much memory for it.
_DIRECTORY = 2**23
# Size in bytes of the records at the end of an archive that locate the central directory, with the longest comment.
_END = 2**16 + 22 + 76
# Errors of the zip module for files that are not archives or are incomplete.
_ARCHIVE_ERRORS = (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, OverflowError, EOFError, KeyError)
# Maximum size of a pickle in bytes. It exceeds the memory budget for the pickle's objects.
_PICKLE = 2**28


def load_torch_file(stream: IO[bytes], size: int, allowed: Mapping[str, Any], *, values: bool = True) -> Any:
    """Read a file that ``torch.save`` wrote. Tensors are on the CPU.

    Args:
        stream: the open file.
        size: size of the file in bytes.
        allowed: classes and functions that the user trusts, as in
            :func:`~lightning_pipe.checkpoints.inert_pickle.load_inert`.
        values: False to skip the storages (default True): every tensor is then None.

    Raises:
        _Refused: the file is damaged, or holds values that are neither plain nor allowed.
    """
    with open_archive(stream, size) as archive:
        storages = _Storages(archive)
        calls = TENSOR_CALLS if values else {name: Call(name, lambda *_: None) for name in TENSOR_CALLS}

        def find(name: str) -> Any:
            for table in (calls, TOKENS, PLAIN_CALLS, ARRAY_CALLS, DTYPES):
                if name in table:
                    return table[name]
            raise _Refused(
                f"it holds {name}, not only tensors, arrays of numbers and plain types, and could run arbitrary code"
                " when it is read. If you trust its source, pass weights_only=False, as in Trainer.fit(...,"
                " weights_only=False), or allow the class: torch.serialization.add_safe_globals([...])"
            )

        return load_inert(
            pickle_of(archive), find, persistent=storages.find if values else lambda _: None, allowed=allowed
        )


def known_name(name: str) -> bool:
    """Return True if :func:`load_torch_file` accepts this name without the user's permission."""
    return any(name in table for table in (TENSOR_CALLS, TOKENS, PLAIN_CALLS, ARRAY_CALLS, DTYPES))


# ---------------------------------------------------------------------- the archive


def open_archive(stream: IO[bytes], size: int) -> zipfile.ZipFile:
    """Open an archive, and check that its entries are uncompressed, do not overlap and fit into the file.

    Args:
        stream: the open file.
        size: size of the file in bytes.

    Raises:
        _Refused: the file is not such an archive.
    """
    stream.seek(max(0, size - _END))
    end = stream.read(_END)
    # The zip module reads the whole central directory at once. Its size is in one of two records.
    for found in re.finditer(rb"PK\x05\x06", end):
        place = found.start()
        wide = end[place - 36 : place - 28] if end[max(0, place - 20) : place].startswith(b"PK\x06\x07") else b""
        if max(int.from_bytes(one, "little") for one in (end[place + 12 : place + 16], wide)) > _DIRECTORY:
            raise _Refused(f"its list of entries is longer than {_DIRECTORY} bytes, the maximum")
    stream.seek(0)
    try:
        archive = zipfile.ZipFile(stream)
    except _ARCHIVE_ERRORS as error:
        raise _Damaged(f"it is no file of torch.save, or is cut short: {error}") from None
    infos = archive.infolist()
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise _Refused(
                f"its entry {described(info.filename)} is compressed or encrypted, expected as torch.save writes it"
            )
        if info.file_size != info.compress_size or info.header_offset + info.file_size > size:
            raise _Damaged(f"its entry {described(info.filename)} has {info.file_size} bytes, more than the file holds")
    if sum(info.file_size for info in infos) > size:
        raise _Refused(f"its entries overlap: their total size exceeds the {size} bytes of the file")
    if len({info.filename for info in infos}) != len(infos):
        raise _Refused("two of its entries have the same name")
    return archive


def _folder(archive: zipfile.ZipFile) -> str:
    """Common folder name of all entries, with a trailing slash."""
    found = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(found) != 1:
        raise _Refused(f"it has {len(found)} entries named data.pkl, expected one: it is no file of torch.save")
    return found[0].removesuffix("data.pkl")


def pickle_of(archive: zipfile.ZipFile) -> bytes:
    """Content of an archive's pickle."""
    info = archive.getinfo(_folder(archive) + "data.pkl")
    if info.file_size > _PICKLE:
        raise _Refused(f"its entry {info.filename!r} has {info.file_size} bytes, expected at most {_PICKLE}")
    return _content(archive, info)


def _content(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    with _entry(archive, info) as entry:
        return entry.read()


@contextmanager
def _entry(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> Iterator[IO[bytes]]:
    """Open an entry. Its checksum is compared when the end is read."""
    try:
        with archive.open(info) as entry:
            yield entry
    except _ARCHIVE_ERRORS as error:
        raise _Damaged(f"its entry {described(info.filename)} is damaged: {error}") from None


class _Storages:
    """Storages of an archive. Each is read when the pickle first refers to it."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive, self._folder = archive, _folder(archive)
        self._entries = {info.filename: info for info in archive.infolist()}
        self._read: dict[str, torch.UntypedStorage] = {}
        self._truths: set[str] = set()  # boolean storages whose bytes have been checked
        order = self._entries.get(f"{self._folder}byteorder")
        written = _content(archive, order) if order is not None and order.file_size < 16 else b"little"
        if written != sys.byteorder.encode():
            raise _Refused(f"its numbers have the byte order {written!r}, expected the byte order of this machine")

    def find(self, key: Any) -> InertStorage:
        """Storage of a persistent id: the tuple ("storage", class, entry, device, number of elements)."""
        if type(key) is not tuple or len(key) != 5 or key[0] != "storage" or type(key[2]) is not str:
            raise _Refused(f"a storage is named by {described(key)}, expected ('storage', class, key, device, count)")
        _, kind, name, _, count = key
        if type(kind) is not Call or kind.name not in STORAGE_KINDS:
            raise _Refused(f"the storage {described(name)} is a {described(kind)}, expected a class of storages")
        info = self._entries.get(f"{self._folder}data/{name}")
        dtype = STORAGE_KINDS[kind.name]
        if info is None or type(count) is not int or count * dtype.itemsize != info.file_size:
            there = "no bytes" if info is None else f"{info.file_size} bytes"
            raise _Refused(
                f"the storage {described(name)} has {described(count)} elements of {dtype}, but its entry has {there}"
            )
        if name not in self._read:
            self._read[name] = self._storage(info)
        content = self._read[name]
        if dtype is torch.bool and name not in self._truths:
            if bool((torch.empty(0, dtype=torch.uint8, device="cpu").set_(content) > 1).any()):
                raise _Refused(f"the boolean storage {described(name)} has bytes other than 0 and 1")
            self._truths.add(name)
        return InertStorage(dtype, content)

    def _storage(self, info: zipfile.ZipInfo) -> torch.UntypedStorage:
        content = torch.empty(info.file_size, dtype=torch.uint8, device="cpu")
        view, at = memoryview(content.numpy()), 0  # type: ignore[arg-type]
        with _entry(self._archive, info) as entry:
            while piece := entry.read(2**20):
                view[at : at + len(piece)] = piece
                at += len(piece)
        if at != info.file_size:
            raise _Damaged(f"its entry {info.filename!r} ends after {at} bytes, expected {info.file_size}")
        return content.untyped_storage()
