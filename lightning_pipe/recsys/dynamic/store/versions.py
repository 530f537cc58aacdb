"""Folder of one rank's store: a working copy that may be lost, and durable versions.

    lock              held while the store is open; released by the operating system when the process ends in any way
    store.json        format, description, the run and rank of the store, and the committed version, 0 before the first
    version.12/       a RocksDB checkpoint, never changed
    version.13/       a prepared version; replaces version.12 as soon as store.json names it
    working/          working copy; created from a version whenever the store is opened
    *.new             leftovers of a killed process; never read

RocksDB never changes a file of records (.sst) after writing it. The working copy and the versions share these files as
hard links, so a version costs only the changes since the previous one.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from lightning_pipe.engine.common.durable_files import fsync_parents, fsync_path, write_and_fsync
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.store.folder_lock import FolderLock
from lightning_pipe.recsys.dynamic.store.row_store import RankStoreIdentity, StoreState

_FORMAT = 1
_FILE = "store.json"


class VersionedFolder:
    """Folder of a store with a working copy, which :meth:`recover` creates, and versions."""

    def __init__(self, path: Path, description: Mapping[str, Any]) -> None:
        self._path = path
        self.working = path / "working"
        with self._system_errors():
            path.mkdir(parents=True, exist_ok=True)
            try:
                self._lock = FolderLock(path)
            except BlockingIOError as error:
                raise SetupError(
                    f"the store of rows in {path} is in use by {error} process; expected one user of a rank's folder."
                    " Wait until the folder is released, or use another folder"
                ) from error
        try:
            with self._system_errors():
                self._description = json.loads(json.dumps(description))
                self.state = self._load_state()
        except BaseException:
            self.close()
            raise

    def recover(self, version: int) -> None:
        """Create the working copy from *version*, and remove all other versions and leftovers of killed processes."""
        assert version in (self.state.committed, self.state.prepared)
        with self._system_errors():
            if version == self.state.prepared:
                self.commit(version)
            self.state = replace(self.state, prepared=None)
            source = self._get_version_path(version)
            for entry in self._path.iterdir():
                if entry.name.endswith(".new") or (entry.name.startswith(("version.", "working")) and entry != source):
                    _remove(entry)
            if version > 0:
                shutil.copytree(source, self.working, copy_function=_link_or_copy)

    def prepare_commit(self, version: int, fill: Callable[[Path], None]) -> None:
        """Write a durable version, which *fill* creates as a RocksDB checkpoint; replaces one that is prepared."""
        assert version == self.state.committed + 1
        with self._system_errors():
            self.state = replace(self.state, prepared=None)
            unfinished, prepared = self._path / f"version.{version}.new", self._get_version_path(version)
            _remove(unfinished)
            _remove(prepared)
            fill(unfinished)
            for file in unfinished.iterdir():
                if file.suffix != ".sst":
                    fsync_path(file)
            fsync_path(unfinished)
            os.replace(unfinished, prepared)
            fsync_path(self._path)
            self.state = replace(self.state, prepared=version)

    def commit(self, version: int) -> None:
        """Make the prepared version the current one, durably."""
        assert version == self.state.prepared
        with self._system_errors():
            self._write_state(StoreState(version, None, self.state.part))
            _remove(self._get_version_path(version - 1))

    def write_identity(self, part: RankStoreIdentity) -> None:
        """Make the store this part of a run, durably."""
        with self._system_errors():
            self._write_state(replace(self.state, part=part))

    def close(self) -> None:
        """Release the folder. The working copy stays; the next opening removes it."""
        self._lock.close()

    def damaged_error(self, reason: object) -> SetupError:
        """Error for a folder whose contents differ from the files that were written."""
        return SetupError(
            f"the store of rows in {self._path} is damaged: {reason}. Restore the folders of all ranks from copies made"
            " at the same time, or start with empty folders"
        )

    def unwritable_error(self, reason: object) -> SetupError:
        """Error for a full disk, or a folder that cannot be written."""
        return SetupError(
            f"the store of rows in {self._path} cannot be written: {reason}; it needs write permission and room for all"
            " changes between two commits. The committed version is intact: free disk space or fix the permissions, and"
            " restart from it"
        )

    @contextmanager
    def _system_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self.unwritable_error(error) from error

    def _get_version_path(self, version: int) -> Path:
        return self._path / f"version.{version}"

    def _write_state(self, state: StoreState) -> None:
        """Replace the store's file, with a checksum, and take over the state."""
        part = None if state.part is None else asdict(state.part)
        contents = {"format": _FORMAT, "description": self._description, "part": part, "committed": state.committed}
        text = json.dumps(contents, sort_keys=True, indent=1)
        unfinished = self._path / f"{_FILE}.new"
        write_and_fsync(unfinished, f"{text}\n{zlib.crc32(text.encode()):08x}\n".encode())
        os.replace(unfinished, self._path / _FILE)
        fsync_path(self._path)
        self.state = state

    def _load_state(self) -> StoreState:
        names = {file.name for file in self._path.iterdir()} - {"lock", f"{_FILE}.new"}
        if not names:
            self._write_state(StoreState(0, None))
            fsync_parents(self._path)
            return self.state
        if _FILE not in names:
            raise self.damaged_error(f"it has {', '.join(sorted(names))}, but no {_FILE}")
        text, _, checksum = (self._path / _FILE).read_bytes().removesuffix(b"\n").rpartition(b"\n")
        if f"{zlib.crc32(text):08x}".encode() != checksum:
            raise self.damaged_error(f"{_FILE} does not match its checksum")
        try:
            contents: dict[str, Any] = json.loads(text)
            part = None if contents["part"] is None else RankStoreIdentity(**contents["part"])
            committed = int(contents["committed"])
            stored = {"format": contents["format"], **contents["description"]}
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise self.damaged_error(f"{_FILE} has other contents ({error})") from error
        if differences := list(_describe_config_differences(stored, {"format": _FORMAT, **self._description})):
            raise SetupError(
                f"the store of rows in {self._path} was created with a different configuration:"
                f" {'; '.join(differences)}. Restore that configuration, or use another folder"
            )
        versions = {int(match[1]) for name in names if (match := re.fullmatch(r"version\.(\d+)", name))}
        # The previous version may still exist if the process was killed.
        if versions - {committed - 1, committed, committed + 1} or (committed > 0 and committed not in versions):
            raise self.damaged_error(
                f"the committed version is {committed}, but the folder has the versions {sorted(versions)}"
            )
        return StoreState(committed, committed + 1 if committed + 1 in versions else None, part)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _link_or_copy(source: str, target: str) -> None:
    """Link a file of records; copy other files, and all where the file system has no hard links."""
    try:
        if source.endswith(".sst"):
            os.link(source, target)
            return
    except OSError:
        pass
    shutil.copyfile(source, target)


def _describe_config_differences(stored: Any, expected: Any, where: str = "") -> Iterator[str]:
    """Descriptions of the differences between two values of plain types, entry by entry."""
    if isinstance(stored, dict) and isinstance(expected, dict):
        for key in sorted(stored.keys() | expected.keys()):
            yield from _describe_config_differences(
                stored.get(key), expected.get(key), f"{where}.{key}" if where else key
            )
    elif stored != expected:
        yield f"{where} is {reprlib.repr(stored)} in the store and {reprlib.repr(expected)} here"
