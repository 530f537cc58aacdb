"""Reads the files of a checkpoint so that none of them can run code, and a damaged one is named.

A pickle can call anything when it is loaded, ``torch.distributed.checkpoint`` unpickles freely, and even
``torch.load(weights_only=True)`` calls functions with arguments of the file's choosing, which makes of ten bytes a
gigabyte, or memory that nobody has written. So pickles are read here as data: see ``inert_pickle``.

Trusted are this machine's Python and its packages, the user's own ``torch.serialization.add_safe_globals``, which are
read and never changed, and a whole file where ``weights_only=False`` is given: any code in it runs. The path of the
folder is trusted, links in it are followed. Not trusted is anything in the folder: neither bytes nor names, sizes or
kinds of files. What is read is a file of the folder itself, no link, device or pipe. A file that is not as it should be
ends in one SetupError that names it and its field, in time and memory in proportion to its size.

Tested in ``tests/scenarios/checkpoints/test_hostile_checkpoints.py``.
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
from lightning_pipe.checkpoints.torch_file import known_name, load_torch_file, open_archive, pickle_of
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.safe_text import printable

__all__ = ["SafePlanner", "SafeReader", "file_named", "load_object", "unsafe_names"]

# Packages that register classes of their own with torch.serialization, without the user's leave.
_REGISTERED = ("numpy.", "tensordict.", "torch._dynamo.", "torch.distributed.", "torch.nested.", "torch.return_types.")


class SafeReader(dcp.FileSystemReader):
    """Reads a folder's files; an error of any names it.

    Args:
        folder: of a checkpoint.
        metadata: what :meth:`read_metadata` returned before; it is not read again.
    """

    def __init__(self, folder: Path, metadata: dcp.Metadata | None = None) -> None:
        super().__init__(folder)
        self._folder = folder
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """What is in the folder, of the file ``.metadata``.

        Raises:
            SetupError: it is damaged, or holds what no checkpoint needs.
        """
        if self._metadata is None:
            with _opened(self._folder / ".metadata") as stream:
                self._metadata = load_metadata(stream, self._folder)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what is planned, file by file.

        Raises:
            SetupError: a file is damaged, or holds what is not allowed.
        """
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            with _opened(self._folder / name) as stream:
                for item in items:
                    info = self.storage_data[item.storage_index]
                    span = _Span(stream, info.offset, info.length)
                    if item.type is LoadItemType.BYTE_IO:
                        planner.load_bytes(item, span)  # type: ignore[arg-type]
                    else:
                        _fill(span, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _fill(span: _Span, item: ReadItem, planner: LoadPlanner) -> None:
    """Read a tensor, or the part of it that is needed."""
    name = f"the entry {described(item.storage_index.fqn)}"
    value = load_torch_file(span, span.length, {})
    if not isinstance(value, Tensor):
        raise _Refused(f"{name} holds {described(value)}, expected a tensor")
    ends = [offset + length for offset, length in zip(item.storage_offsets, item.lengths, strict=True)]
    if value.dim() != len(ends) or any(end > size for end, size in zip(ends, value.size(), strict=True)):
        raise _Refused(
            f"{name} holds a tensor of size {list(value.size())}, expected at least {ends} as .metadata says"
        )
    part = value.detach()
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(dimension, offset, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(part)
    planner.commit_tensor(item, target)


class SafePlanner(dcp.DefaultLoadPlanner):
    """Reads what is no tensor as :func:`load_object` does.

    Args:
        weights_only: see there.
        allow_partial_load: see :class:`torch.distributed.checkpoint.DefaultLoadPlanner`.
    """

    def __init__(self, *, weights_only: bool | None, allow_partial_load: bool = False) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, _load(value, self._weights_only))


def load_object(path: Path, weights_only: bool | None, *, values: bool = True) -> Any:
    """What ``torch.save`` wrote, on the CPU.

    Args:
        path: of the file.
        weights_only: False to allow any class, whose code runs then; otherwise tensors, arrays of numpy, plain types
            and the classes that were given to ``torch.serialization.add_safe_globals``.
        values: False to leave out the values: every tensor is then None, and no class is allowed.

    Raises:
        SetupError: it is damaged, or holds a class that is not allowed; names the file and the class.
    """
    with _opened(path) as stream:
        return _load(stream, weights_only) if values else load_torch_file(stream, _size(stream), {}, values=False)


def unsafe_names(saved: bytes) -> list[str]:
    """The classes and functions in what ``torch.save`` wrote that :func:`load_object` refuses by default."""
    with open_archive(io.BytesIO(saved), len(saved)) as archive:
        pickled = pickle_of(archive)
    named = {str(name).replace(" ", ".") for opcode, name, _ in pickletools.genops(pickled) if opcode.name == "GLOBAL"}
    named = {name.replace("__builtin__.", "builtins.") for name in named}
    return sorted(name for name in named - _allowed().keys() if not known_name(name))


# ---------------------------------------------------------------------- files


def _allowed() -> dict[str, Any]:
    """What the user allows, by the names that pickles have for it."""
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
        damaged = archive.testzip()  # which torch.load does not do
    if damaged is not None:
        raise _Damaged(f"the checksum of its entry {damaged!r} differs")
    stream.seek(0)
    try:
        return torch.load(stream, map_location="cpu", weights_only=False)
    except Exception as error:  # whatever the classes that are trusted make of it
        raise _Damaged(f"{type(error).__name__}: {error}".partition("\n")[0]) from error


def _size(stream: IO[bytes]) -> int:
    size = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    return size


class _Span(io.RawIOBase, IO[bytes]):
    """Some bytes of a file, as a file. (PyTorch's own counts from the end in the wrong direction.)"""

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
            raise OSError(f"there are {self.length} bytes only")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(0, self.length - self._position)]
        self._file.seek(self._offset + self._position)
        count: int = self._file.readinto(view)  # type: ignore[attr-defined]
        self._position += count
        return count


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """A file of a folder; whatever is wrong with it names it."""
    with file_named(path):
        # A pipe would wait for somebody to write to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0) | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise _Refused("it is a folder, a pipe or a device, expected a file")
            yield stream


@contextmanager
def file_named(path: Path) -> Iterator[None]:
    """Say which file it is that cannot be read."""
    try:
        yield
    except _Damaged as error:
        raise SetupError(
            f"the checkpoint's file {str(path)!r} cannot be read: {error}. It is damaged, or was not written"
            " whole; take another checkpoint"
        ) from None
    except _Refused as error:
        said = printable(str(error))
        raise SetupError(f"the checkpoint's file {str(path)!r} is refused: {said}. Take another checkpoint") from None
    except OSError as error:
        reason = (
            "it is a link, expected a file of the folder" if error.errno == errno.ELOOP else error.strerror or error
        )
        raise SetupError(
            f"the checkpoint's file {str(path)!r} cannot be read: {reason}; take another checkpoint"
        ) from error
