"""Checkpoint folders at a URL, such as ``s3://bucket/runs/last.ckpt``, through fsspec.

Object stores have no rename that would replace a folder in one step. A checkpoint is therefore written to a new hidden
folder next to its URL, ``.last.ckpt.<16 hexadecimal digits>/``, with the files of a local checkpoint folder. An object
at the URL itself names that folder. It is written last, in one request. At any time the URL leads to the complete old
checkpoint, to the complete new one, or does not exist. Hidden folders that no object names are ignored, and removed by
the next save to the same URL.

The file system repeats failed requests; s3fs does so with increasing delays. Credentials come from its environment
variables and from fsspec's configuration files; URLs that contain a password are refused.
"""

from __future__ import annotations

import json
import re
import secrets
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Literal

from fsspec.core import has_magic, url_to_fs

from lightning_pipe.engine import SetupError

# Size of a read request in bytes, in which small values that are stored in sequence are read together.
_BLOCK = 2**25
_LARGEST_MARKER = 2**12
_FIELD = "lightning_pipe_checkpoint"


class RemotePath:
    """File or folder at a URL, with those methods of ``pathlib.Path`` that checkpoints need."""

    def __init__(self, url: str) -> None:
        if re.search("://[^@]*:[^@]*@", url):
            raise SetupError(
                f"the checkpoint's URL {url.partition('://')[0]}://... contains a password, which messages and"
                " checkpoints would repeat. Pass it in the environment variables of the file system, or in fsspec's"
                " configuration files"
            )
        if has_magic(url) or "::" in url:
            # Removing "a[1]" would remove "a1". What follows may be a signature, so it is not repeated.
            raise SetupError(
                f"the checkpoint's URL {url.partition('://')[0]}://... contains *, ?, [ or ::, which fsspec would"
                " expand. Rename it"
            )
        self._url = url if re.fullmatch(r"[^/]*:/+", url) else url.rstrip("/")
        try:
            # Without a cache, since other processes change the folders.
            self.fs, self._path = url_to_fs(self._url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise SetupError(f"the checkpoint's URL {url!r} cannot be used: {error}") from error

    def __str__(self) -> str:
        return self._url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._url.removesuffix('/')}/{name}")

    @property
    def name(self) -> str:
        """Part of the URL after the last slash."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """Folder of the file."""
        return RemotePath(self._url[: -len(self.name)])

    def _get_entry_type(self) -> str | None:
        """Kind of what is there; None if nothing is. fsspec's ``isfile`` takes refused requests for absent files."""
        with self.errors(), suppress(FileNotFoundError):
            return str(self.fs.info(self._path)["type"])
        return None

    def is_file(self) -> bool:
        return self._get_entry_type() == "file"

    def is_dir(self) -> bool:
        return self._get_entry_type() == "directory"

    def exists(self) -> bool:
        return self._get_entry_type() is not None

    def folders(self, pattern: re.Pattern[str]) -> list[RemotePath]:
        """Folders below this one whose names match *pattern*."""
        return [self / name for name in self._names("directory") if pattern.fullmatch(name)]

    def files(self) -> set[str]:
        """Names of the files in this folder."""
        return set(self._names("file"))

    def _names(self, kind: str) -> list[str]:
        with self.errors(), suppress(FileNotFoundError):
            entries = [entry for entry in self.fs.ls(self._path, detail=True) if entry["type"] == kind]
            return [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries]
        return []

    def open(self, mode: Literal["rb"]) -> IO[bytes]:
        """Open the file for reading. Bytes are requested in large blocks."""
        with self.errors():
            stream: IO[bytes] = self.fs.open(self._path, "rb", block_size=_BLOCK, cache_type="readahead")
        return stream

    def read_first_bytes(self, size: int) -> bytes:
        """First bytes of the file."""
        with self.errors():
            return bytes(self.fs.cat_file(self._path, start=0, end=size)) if self.fs.size(self._path) else b""

    def read_bytes(self) -> bytes:
        with self.errors():
            return bytes(self.fs.cat_file(self._path))

    def write_bytes(self, content: bytes) -> None:
        """Write the file in one request, so that it is complete or absent."""
        with self.errors():
            self.fs.pipe_file(self._path, content)

    def upload(self, folder: Path) -> None:
        """Copy all files of a local folder into this one."""
        with self.errors():
            self.fs.put(f"{folder}/", f"{self._path}/", recursive=True)

    def download(self, folder: Path) -> None:
        """Copy all files of this folder into a local one."""
        with self.errors():
            self.fs.get(f"{self._path}/", f"{folder}/", recursive=True)

    def remove(self) -> None:
        """Remove the file, or the folder with all files."""
        with self.errors(), suppress(FileNotFoundError):
            self.fs.rm(self._path, recursive=True)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Convert all errors of the file system to an OSError, which callers expect of files."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:  # each file system has its own classes
            raise OSError(f"{type(error).__name__}: {error}") from error


Folder = Path | RemotePath


def parse_local_or_remote_path(path: str | Path) -> Folder:
    """Path of a checkpoint: a ``Path``, or a ``RemotePath`` if it is given as a URL."""
    text = str(path)
    if "://" not in text:
        if isinstance(path, Path) and re.match(r"[a-z][a-z0-9]+:/", text):
            raise SetupError(f"the checkpoint's path is {path!r}, a Path, which cannot be a URL. Pass the URL as a str")
        return Path(path)
    if text.startswith(("file://", "local://")):
        return Path(url_to_fs(text)[1])
    return RemotePath(text)


def follow_checkpoint_marker(place: Folder) -> Folder:
    """Folder with the files of a checkpoint, to be read. For a local path this is the path itself."""
    if isinstance(place, Path):
        return place
    try:
        name = _read_folder_from_marker(place) if place.is_file() else None
    except OSError as error:
        raise SetupError(f"the checkpoint {str(place)!r} cannot be read: {error}") from error
    # A folder at the URL itself is a local checkpoint that was uploaded.
    return place if name is None else place.parent / name


@contextmanager
def local_copy(folder: Folder, name: str) -> Iterator[Path]:
    """Local folder with the subfolder *name* of *folder*: *folder* itself, or a temporary one with a download."""
    if isinstance(folder, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="lightning_pipe_") as copy:
        (Path(copy) / name).mkdir()
        try:
            (folder / name).download(Path(copy) / name)
        except OSError as error:
            raise SetupError(f"the folder {str(folder / name)!r} cannot be read: {error}") from error
        yield Path(copy)


def begin_remote_checkpoint(place: RemotePath) -> str:
    """Remove what interrupted saves have left, and return the name of a new folder. Called on one rank."""
    if place.is_dir():
        raise SetupError(
            f"{str(place)!r} is a folder, which cannot be replaced in one step. Give a new URL, or remove the folder"
        )
    # Any other file at the URL is replaced, as on a disk.
    _remove_hidden_folders(place, but=_read_folder_from_marker(place) if place.is_file() else None)
    return f".{place.name}.{secrets.token_hex(8)}"


def finish_remote_checkpoint(place: RemotePath, written: str) -> None:
    """Make the URL lead to the written folder, and then remove the old one. Called on one rank."""
    place.write_bytes(json.dumps({_FIELD: 1, "folder": written}).encode())
    with _removal_errors_as_warnings(place):
        _remove_hidden_folders(place, but=written)


def remove_remote_checkpoint(place: RemotePath) -> None:
    """Remove a checkpoint. For other processes it disappears in one step. Called on one rank."""
    with _removal_errors_as_warnings(place):
        place.remove()
        _remove_hidden_folders(place, but=None)


@contextmanager
def _removal_errors_as_warnings(place: RemotePath) -> Iterator[None]:
    """Convert an error to a warning: a role without the right to delete can still save."""
    try:
        yield
    except OSError as error:
        warnings.warn(f"files of an old checkpoint {str(place)!r} could not be removed: {error}", stacklevel=4)


def _remove_hidden_folders(place: RemotePath, but: str | None) -> None:
    for folder in place.parent.folders(_make_hidden_folder_pattern(place)):
        if folder.name != but:
            folder.remove()


def _make_hidden_folder_pattern(place: RemotePath) -> re.Pattern[str]:
    return re.compile(rf"\.{re.escape(place.name)}\.[0-9a-f]{{16}}")


def _read_folder_from_marker(place: RemotePath) -> str | None:
    """Name of the folder that the object at the URL names. None if it is another file, or has been renamed."""
    try:
        marker = json.loads(place.read_first_bytes(_LARGEST_MARKER))
    except (ValueError, RecursionError):
        return None
    name = marker.get("folder") if isinstance(marker, dict) and marker.get(_FIELD) == 1 else None
    return name if isinstance(name, str) and _make_hidden_folder_pattern(place).fullmatch(name) else None
