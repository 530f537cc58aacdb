"""Reads the files of a checkpoint without running code from them, and names damaged files in errors.

A pickle can call any function when it is loaded. ``torch.distributed.checkpoint`` unpickles without restrictions, and
even ``torch.load(weights_only=True)`` calls functions with arguments chosen by the file, which can turn ten bytes into
a gigabyte or expose uninitialised memory. This module therefore reads pickles as data: see ``inert_pickle``.

Trusted are this machine's Python and its packages; the user's ``torch.serialization.add_safe_globals``, which are read
and never changed; and a whole file if ``weights_only=False`` is given, so that any code in it runs. The path of the
folder is trusted too, and links in it are followed. The content of the folder is not trusted: bytes, names, sizes and
kinds of files. Only regular files of the folder are read, no links, devices or pipes. An invalid file raises one
SetupError that names the file and its field, in time and memory proportional to the file's size.
"""

from __future__ import annotations

import errno
import io
import os
import pickletools
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from lightning_pipe.checkpoints.folder_metadata import load_metadata
from lightning_pipe.checkpoints.inert_values import _Damaged, _Refused, described
from lightning_pipe.checkpoints.remote_folder import Folder
from lightning_pipe.checkpoints.torch_file import known_name, load_torch_file, open_archive, pickle_of
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.safe_text import printable

# Packages that register their own classes with torch.serialization, without the user's consent.
_REGISTERED = ("numpy.", "tensordict.", "torch._dynamo.", "torch.distributed.", "torch.nested.", "torch.return_types.")


# Maximum size in bytes of a value that is read at once, before it is decoded.
_IN_MEMORY = 2**24


class SafeReader(dcp.FileSystemReader):
    """Reads the files of a checkpoint folder. Errors name the file.

    Args:
        folder: checkpoint folder.
        metadata: earlier result of :meth:`read_metadata`, which is then not read again (default None).
    """

    def __init__(self, folder: Folder, metadata: dcp.Metadata | None = None) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """Read the folder's file ``.metadata``.

        Raises:
            SetupError: the file is damaged, or holds values that no checkpoint needs.
        """
        if self._metadata is None:
            with _opened(self._folder / ".metadata") as stream:
                self._metadata = load_metadata(stream, self._folder)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned items, file by file.

        Raises:
            SetupError: a file is damaged, or holds values that are not allowed.
        """
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            # In the order of the file: a remote file is read in blocks.
            items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
            with _opened(self._folder / name) as stream:
                for item in items:
                    info = self.storage_data[item.storage_index]
                    span = _Span(stream, info.offset, info.length)
                    if info.length <= _IN_MEMORY:
                        # The end of an archive is read first, which would request the block after it.
                        span = _Span(io.BytesIO(span.read()), 0, info.length)
                    if item.type is LoadItemType.BYTE_IO:
                        planner.load_bytes(item, span)  # type: ignore[arg-type]
                    else:
                        _fill(span, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _fill(span: _Span, item: ReadItem, planner: LoadPlanner) -> None:
    """Read the planned part of a tensor into its target."""
    name = f"the entry {described(item.storage_index.fqn)}"
    value = load_torch_file(span, span.length, {})
    if not isinstance(value, Tensor):
        raise _Refused(f"{name} holds {described(value)}, expected a tensor")
    ends = [offset + length for offset, length in zip(item.storage_offsets, item.lengths, strict=True)]
    if value.dim() != len(ends) or any(end > size for end, size in zip(ends, value.size(), strict=True)):
        raise _Refused(
            f"{name} holds a tensor of size {list(value.size())}, expected at least {ends} according to .metadata"
        )
    part = value.detach()
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(dimension, offset, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(part)
    planner.commit_tensor(item, target)


class SafePlanner(dcp.DefaultLoadPlanner):
    """Load planner that reads values other than tensors as :func:`load_object` does.

    Args:
        weights_only: as in :func:`load_object`.
        allow_partial_load: as in :class:`torch.distributed.checkpoint.DefaultLoadPlanner` (default False).
    """

    def __init__(self, *, weights_only: bool | None, allow_partial_load: bool = False) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, _load(value, self._weights_only))


def load_object(path: Folder, weights_only: bool | None, *, values: bool = True) -> Any:
    """Read a file that ``torch.save`` wrote. Tensors are on the CPU.

    Args:
        path: path of the file.
        weights_only: False to allow any class, whose code then runs. With None or True, only tensors, NumPy arrays,
            plain types and the classes given to ``torch.serialization.add_safe_globals`` are allowed.
        values: False to skip the values (default True): every tensor is then None, and no additional class is allowed.

    Raises:
        SetupError: the file is damaged, or holds a class that is not allowed. Names the file and the class.
    """
    with _opened(path) as stream:
        return _load(stream, weights_only) if values else load_torch_file(stream, _size(stream), {}, values=False)


def unsafe_names(saved: bytes) -> list[str]:
    """Names of the classes and functions in a file of ``torch.save`` that :func:`load_object` refuses by default."""
    with open_archive(io.BytesIO(saved), len(saved)) as archive:
        pickled = pickle_of(archive)
    named = {str(name).replace(" ", ".") for opcode, name, _ in pickletools.genops(pickled) if opcode.name == "GLOBAL"}
    named = {name.replace("__builtin__.", "builtins.") for name in named}
    return sorted(name for name in named - _allowed().keys() if not known_name(name))


# ---------------------------------------------------------------------- files


def _allowed() -> dict[str, Any]:
    """Classes and functions that the user allows, by their names in pickles."""
    allowed = {}
    for one in torch.serialization.get_safe_globals():
        value, name = one if isinstance(one, tuple) else (one, f"{one.__module__}.{one.__qualname__}")
        if not name.startswith(_REGISTERED):
            allowed[name] = value
    return allowed


def _load(stream: IO[bytes], weights_only: bool | None) -> Any:
    size = _size(stream)
    if weights_only is not False:
        return load_torch_file(stream, size, _allowed())
    with open_archive(stream, size) as archive:
        damaged = archive.testzip()  # torch.load does not compare the checksums
    if damaged is not None:
        raise _Damaged(f"the checksum of its entry {damaged!r} differs")
    stream.seek(0)
    try:
        return torch.load(stream, map_location="cpu", weights_only=False)
    except Exception as error:  # trusted classes may raise any error
        raise _Damaged(f"{type(error).__name__}: {error}".partition("\n")[0]) from error


def _size(stream: IO[bytes]) -> int:
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    return size


class _Span(io.RawIOBase, IO[bytes]):
    """File-like view of a range of a file's bytes. (PyTorch's own class gets offsets from the end wrong.)"""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self.length = file, offset, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.length}[whence]
        if start + offset < 0:
            raise OSError(f"the position must be at least 0 in an entry of {self.length} bytes")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(0, self.length - self._position)]
        self._file.seek(self._offset + self._position)
        count: int = self._file.readinto(view)  # type: ignore[attr-defined]
        self._position += count
        return count


@contextmanager
def _opened(path: Folder) -> Iterator[IO[bytes]]:
    """Open a regular file of a folder. Errors while it is open name the file."""
    with file_named(path):
        if not isinstance(path, Path):
            with path.open() as stream:
                yield stream
            return
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _Refused("it is a folder, a pipe or a device, expected a file")
            yield stream


@contextmanager
def file_named(path: Folder) -> Iterator[None]:
    """Convert errors to a SetupError that names the file."""
    try:
        yield
    except _Damaged as error:
        raise SetupError(
            f"the checkpoint's file {str(path)!r} cannot be read: {error}. It is damaged or incomplete. Use another"
            " checkpoint"
        ) from None
    except _Refused as error:
        said = printable(str(error))
        raise SetupError(f"the checkpoint's file {str(path)!r} is refused: {said}. Use another checkpoint") from None
    except OSError as error:
        reason = (
            "it is a link, expected a file of the folder" if error.errno == errno.ELOOP else error.strerror or error
        )
        raise SetupError(
            f"the checkpoint's file {str(path)!r} cannot be read: {reason}. Use another checkpoint"
        ) from error
