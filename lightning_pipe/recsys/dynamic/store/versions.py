"""The folder of one rank's store: a working copy that may be lost, and the versions that may not.

    lock              held while the store is open; the system lets go of it when the process ends, however it does
    store.json        what the store is: format, engine, description, and whose part of which run
    committed.json    the version that is the present one, 0 before the first
    version.12/       its files, which nobody changes, and contents.json: their sizes, and the version's notes
    version.13/       prepared: in place of version.12 as soon as committed.json says so
    working/          the engine's own; made anew from a version whenever the store is opened
    *.new, trash.*    what a process that was killed has left; nobody reads it

Files that the engine never changes once written are shared between working copy and versions as hard links, so that a
version costs what has changed since the last.

Tested in ``tests/scenarios/fuzzing/test_store_files.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_pipe.engine.common.durable_files import sync, sync_name
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.store.durable import (
    discard,
    link_files,
    move,
    write_json,
)
from lightning_pipe.recsys.dynamic.store.folder_lock import FolderLock
from lightning_pipe.recsys.dynamic.store.row_store import RunPart, StoreState
from lightning_pipe.recsys.dynamic.store.version_files import (
    fingerprint,
    part_of,
    read_committed,
    read_contents,
    read_header,
    short,
)

__all__ = ["VersionedFolder"]

_FORMAT = 1
# What is there of a store that is being made.
_FIRST = {"lock", "committed.json", "committed.json.new", "store.json.new"}


class VersionedFolder:
    """What is in the folder, and how it becomes a version.

    Args:
        path: the folder; made where it is not there.
        engine: what made the files; another engine's are refused.
        description: as :class:`~lightning_pipe.recsys.dynamic.store.row_store.RowStore`'s, with the tables' widths.
        shared: the end of the names of files that the engine never changes once written.

    Attributes:
        state: what was found, or has become of it since.
        working: the working copy, there after :meth:`settle`.

    Raises:
        SetupError: the folder is in use, not writable, damaged, or of another engine or description.
    """

    def __init__(self, path: Path, engine: str, description: Mapping[str, Any], shared: str) -> None:
        self._path = path
        self._shared = shared
        self.working = path / "working"
        self._notes: dict[str, str] = {}
        with self._system_errors():
            path.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock()
        try:
            with self._system_errors():
                self._header = self._read_header({"format": _FORMAT, "engine": engine, "description": description})
                self.state = self._find()
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------------ versions

    def settle(self, version: int) -> None:
        """A working copy of *version*, and no other version; those left over by a killed process go, too."""
        self.require(
            version in (self.state.committed, self.state.prepared),
            f"version {version} is asked for",
            f"the store has version {self.state.committed} committed and {self.state.prepared} prepared",
            "bring back the folders of all ranks as they were together, or start with an empty one",
        )
        with self._system_errors():
            if version == self.state.prepared:
                self.commit(version)
            elif self.state.prepared is not None:
                discard(self._version(self.state.prepared))
            self.state = StoreState(version, None, self.state.part)
            for left in self._path.iterdir():
                ours = left.name.startswith(("trash.", "version.", "working")) or left.name.endswith(".new")
                if ours and left != self._version(version):
                    discard(left)
            if version > 0:
                contents = self._check(version)
                self._notes = contents["notes"]
                link_files(self._version(version), self.working, contents["files"], self._shared)

    def prepare(self, version: int, notes: Mapping[str, str], fill: Callable[[Path], None]) -> None:
        """A durable version, which can become the present one.

        Args:
            version: the committed one's successor; one that is prepared already is replaced.
            notes: kept with it.
            fill: makes the folder that it is given, with the version's files; of those that are shared the bytes are on
                disk when it returns.
        """
        self.require(
            version == self.state.committed + 1,
            f"version {version} is to be prepared",
            f"the next is {self.state.committed + 1}",
            "count versions one by one",
        )
        with self._system_errors():
            if self.state.prepared is not None:
                discard(self._version(version))
                self.state = StoreState(self.state.committed, None, self.state.part)
            new = self._path / f"version.{version}.new"
            discard(new)
            fill(new)
            for file in new.iterdir():
                if not file.name.endswith(self._shared):
                    sync(file)
            files = {file.name: fingerprint(file, self._shared) for file in new.iterdir()}
            write_json(new / "contents.json", {"version": version, "notes": dict(notes), "files": files})
            move(new, self._version(version))
            self.state = StoreState(self.state.committed, version, self.state.part)

    def commit(self, version: int) -> None:
        """The prepared version is the present one."""
        self.require(
            version == self.state.prepared,
            f"version {version} is to be committed",
            f"the one prepared is {self.state.prepared}",
            "prepare it first",
        )
        with self._system_errors():
            notes = self._contents(version)["notes"]
            write_json(self._path / "committed.json", {"version": version})
            self.state = StoreState(version, None, self.state.part)
            self._notes = notes
            discard(self._version(version - 1))

    def notes(self) -> dict[str, str]:
        """Those of the committed version."""
        return dict(self._notes)

    def join(self, part: RunPart) -> None:
        """The store is this part of a run from now on."""
        with self._system_errors():
            header = {**self._header, "part": asdict(part)}
            write_json(self._path / "store.json", header)
            self._header = header
            self.state = StoreState(self.state.committed, self.state.prepared, part)

    def close(self) -> None:
        """Let go of the folder. The working copy stays, for the next to remove."""
        self._lock.close()

    # ------------------------------------------------------------------ errors

    def require(self, condition: bool, found: str, needed: str, fix: str) -> None:
        """Raises SetupError unless *condition* holds."""
        if not condition:
            raise SetupError(f"the store of rows in {self._path}: {found}; {needed}; {fix}")

    def damaged(self, what: str) -> SetupError:
        """The error for a folder whose contents are not what was written."""
        return SetupError(
            f"the store of rows in {self._path} is damaged: {what}; needed are the files as they were written: bring"
            " back a copy of the folders of all ranks, made at the same time, or start with empty ones"
        )

    def unwritable(self, what: object) -> SetupError:
        """The error for a disk that is full, or a folder that cannot be written."""
        return SetupError(
            f"the store of rows in {self._path} cannot be written: {what}; needed are permission and room for all that"
            " changes between two commits: what was committed is whole; make room, and start again from there"
        )

    @contextmanager
    def _system_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise self.unwritable(error) from error

    # ------------------------------------------------------------------ what is there

    def _version(self, version: int) -> Path:
        return self._path / f"version.{version}"

    def _take_lock(self) -> FolderLock:
        try:
            return FolderLock(self._path)
        except BlockingIOError as error:
            raise SetupError(
                f"the store of rows in {self._path} is in use by {error} process; needed is one process for a rank's"
                " folder: wait for the other to end, or use another folder"
            ) from error

    def _read_header(self, wanted: dict[str, Any]) -> dict[str, Any]:
        wanted = json.loads(json.dumps(wanted))
        path = self._path / "store.json"
        try:
            found = read_header(self._path)
        except FileNotFoundError:
            others = sorted(file.name for file in self._path.iterdir() if file.name not in _FIRST)
            if others:
                raise self.damaged(f"it has {', '.join(others)}, but no store.json") from None
            # With the last of them it is a store.
            write_json(self._path / "committed.json", {"version": 0})
            write_json(path, wanted)
            sync_name(self._path)
            return wanted
        except ValueError as error:
            raise self.damaged(str(error)) from error
        differences = list(_differences({key: found.get(key) for key in wanted}, wanted))
        if differences:
            raise SetupError(
                f"the store of rows in {self._path} was made for something else: {'; '.join(differences)}; needed is"
                " the same: change it back, or use another folder"
            )
        return found

    def _find(self) -> StoreState:
        try:
            committed = read_committed(self._path)
        except (FileNotFoundError, ValueError) as error:
            raise self.damaged(str(error)) from error
        versions = {
            int(match[1]) for file in self._path.iterdir() if (match := re.fullmatch(r"version\.(\d+)", file.name))
        }
        # The one before may be there still, where the process was killed.
        odd = versions - {committed - 1, committed, committed + 1}
        if odd or (committed > 0 and committed not in versions):
            raise self.damaged(f"the committed version is {committed}, those in it are {sorted(versions)}")
        if committed > 0:
            self._notes = self._contents(committed)["notes"]
        prepared = committed + 1 if committed + 1 in versions else None
        return StoreState(committed, prepared, part_of(self._header))

    def _contents(self, version: int) -> dict[str, Any]:
        try:
            return read_contents(self._version(version), version)
        except (FileNotFoundError, ValueError) as error:
            raise self.damaged(f"version {version}: {error}") from error

    def _check(self, version: int) -> dict[str, Any]:
        """The version's contents, if its files are as they were."""
        contents = self._contents(version)
        for name, expected in contents["files"].items():
            found: list[int] | None = None
            try:
                found = fingerprint(self._version(version) / name, self._shared, expected)
            except FileNotFoundError:
                pass
            except ValueError as error:
                raise self.damaged(f"version {version}: {error}") from error
            if found != expected:
                raise self.damaged(f"{name} of version {version} has size and checksum {found}, not {expected}")
        return contents


def _differences(found: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """What is not the same in two things of plain types, entry by entry."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted(found.keys() | wanted.keys()):
            inner = f"{where}.{key}" if where else key
            yield from _differences(found.get(key), wanted.get(key), inner)
    elif found != wanted:
        yield f"{where} is {short(found)} in the store and {short(wanted)} here"
