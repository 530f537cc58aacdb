"""Reads the files of a checkpoint without running code from them. An unreadable file is one SetupError that names it.

``torch.distributed.checkpoint`` unpickles ``.metadata`` and values other than tensors without restrictions, and
``torch.load`` does not compare the checksums of an archive's entries. Here values are read with ``weights_only=True``,
unless the user passes ``weights_only=False``, and checksums are compared first.
"""

from __future__ import annotations

import io
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from lightning_pipe._compat.checkpoint_metadata import load_metadata
from lightning_pipe._compat.torch import set_element
from lightning_pipe.checkpoints.remote_folder import Folder
from lightning_pipe.engine import SetupError
from lightning_pipe.engine.common.safe_text import escape_unprintable

# Size in bytes up to which a value of a local file is read at once.
_IN_MEMORY = 2**24


class SafeFileSystemReader(dcp.FileSystemReader):
    """Reader of a checkpoint folder, whose *metadata* are read again if they are not given."""

    def __init__(self, folder: Folder, metadata: dcp.Metadata | None = None) -> None:
        super().__init__(str(folder))
        self._folder = folder
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        if self._metadata is None:
            with open_file(self._folder / ".metadata") as stream:
                content = io.BytesIO(stream.read())
                self._metadata = load_metadata(content)
                end = content.tell()
                # Folders that other programs wrote with torch.distributed.checkpoint have no checksum.
                if end < len(content.getvalue()) and content.getvalue() != with_checksum(content.getvalue()[:end]):
                    raise ValueError("its checksum differs")
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            # In the order of the file: a remote file is read in blocks.
            items.sort(key=lambda item: self.storage_data[item.storage_index].offset)
            with open_file(self._folder / name) as stream:
                for item in items:
                    info = self.storage_data[item.storage_index]
                    value: IO[bytes] = _FileRangeView(stream, info.offset, info.length)
                    if info.length <= _IN_MEMORY or not isinstance(self._folder, Path):
                        # A value is read twice, for its checksums and for its contents. A remote one is fetched once.
                        value = io.BytesIO(value.read())
                    _load_checkpoint_item(value, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _load_checkpoint_item(value: IO[bytes], item: ReadItem, planner: LoadPlanner) -> None:
    if item.type is LoadItemType.BYTE_IO:
        planner.load_bytes(item, value)  # type: ignore[arg-type]
        return
    part = _load_checked_object(value, weights_only=True).detach()
    for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(dimension, offset, length)
    target = planner.resolve_tensor(item).detach()
    target.copy_(part)
    planner.commit_tensor(item, target)


class SafePlanner(dcp.DefaultLoadPlanner):
    """Load planner that reads values other than tensors as :func:`load_torch_save_file` does."""

    def __init__(self, *, weights_only: bool | None, allow_partial_load: bool = False) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        path = self.mappings[read_item.dest_index.fqn]
        set_element(self.original_state_dict, path, _load_checked_object(value, self._weights_only))


def load_torch_save_file(path: Folder, weights_only: bool | None) -> Any:
    """Value in a file of ``torch.save``, with tensors on the CPU; ``weights_only=False`` allows any class."""
    with open_file(path) as stream:
        return _load_checked_object(stream, weights_only)


def with_checksum(metadata: bytes) -> bytes:
    """Content of ``.metadata`` with a checksum after the pickle's end, which unpicklers do not read.

    A changed bit in the place or size of a chunk could otherwise leave rows of a tensor unread.
    """
    return metadata + f"crc32 {zlib.crc32(metadata):08x}".encode()


def check_checksums(file: IO[bytes] | Path) -> None:
    """Raise a ValueError if an entry of a zip archive, as ``torch.save`` writes it, differs from its checksum."""
    with zipfile.ZipFile(file) as archive:
        damaged = archive.testzip()
    if damaged is not None:
        raise ValueError(f"the checksum of its entry {damaged!r} differs")


def _load_checked_object(stream: IO[bytes], weights_only: bool | None) -> Any:
    check_checksums(stream)
    stream.seek(0)
    return torch.load(stream, map_location="cpu", weights_only=weights_only is not False)


class _FileRangeView(io.RawIOBase, IO[bytes]):
    """File-like view of a range of a file's bytes. (PyTorch's own class gets offsets from the end wrong.)"""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        super().__init__()
        self._file, self._offset, self._length = file, offset, length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise OSError(f"the position must be at least 0 in an entry of {self._length} bytes")
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._position)]
        self._file.seek(self._offset + self._position)
        count: int = self._file.readinto(view)  # type: ignore[attr-defined]
        self._position += count
        return count


@contextmanager
def open_file(path: Folder) -> Iterator[IO[bytes]]:
    """Open a file of a checkpoint for reading. Any error while it is open becomes a SetupError that names the file."""
    with name_file_in_errors(path), path.open("rb") as stream:
        yield stream


@contextmanager
def name_file_in_errors(path: Folder | str) -> Iterator[None]:
    """Convert any error of reading a file to one SetupError that names it."""
    try:
        yield
    except SetupError:
        raise
    except Exception as error:  # a damaged file can cause any error
        message = str(error).strip()
        if message.startswith("Weights only load failed"):
            refused = re.search(r"GLOBAL \S+", message) or re.search(r"(?<=WeightsUnpickler error: ).+", message)
            raise SetupError(
                f"the checkpoint's file {str(path)!r} holds more than tensors and plain types"
                f" ({escape_unprintable(refused[0]) if refused else 'no known class'}), and could run any code when"
                " it is read. If you trust its author, pass weights_only=False, as in"
                " Trainer.fit(..., weights_only=False), or allow the class with"
                " torch.serialization.add_safe_globals([...]). Otherwise, use another checkpoint"
            ) from error
        reason = error.strerror if isinstance(error, OSError) and error.strerror else message.partition("\n")[0]
        raise SetupError(
            f"the checkpoint's file {str(path)!r} cannot be read"
            f" ({type(error).__name__}: {escape_unprintable(reason)}). It is damaged, incomplete or"
            " not a checkpoint. Use another checkpoint"
        ) from error
