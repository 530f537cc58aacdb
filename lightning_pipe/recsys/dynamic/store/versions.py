"""Folder of one rank's store: a working copy that may be lost, and durable versions.

    lock              held while the store is open; released by the operating system when the process ends in any way
    store.json        header: format, engine, description, and the rank and run of the store
    committed.json    the current version, 0 before the first commit
    version.12/       files of the version, never changed, and contents.json: their sizes and checksums, and the notes
    version.13/       a prepared version; replaces version.12 as soon as committed.json names it
    working/          working copy of the engine; created from a version whenever the store is opened
    *.new, trash.*    leftovers of a killed process; never read

Files that the engine never changes after writing are shared between the working copy and the versions as hard links. A
version therefore costs only the changes since the previous one.
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
from lightning_pipe.recsys.dynamic.store.durable import discard, link_files, move, write_json
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

_FORMAT = 1
# Files of a store whose creation was interrupted.
_FIRST = {"lock", "committed.json", "committed.json.new", "store.json.new"}


class VersionedFolder:
    """Folder of a store with a working copy and versions.

    Attributes:
        state: current state of the store.
        working: folder of the working copy. :meth:`settle` fills it, or removes it for version 0.
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
        """Create the working copy from *version*, and remove all other versions and leftovers of killed processes."""
        self.require(
            version in (self.state.committed, self.state.prepared),
            f"version {version} was requested",
            f"the store has version {self.state.committed} committed and {self.state.prepared} prepared",
            "Restore the folders of all ranks from copies made at the same time, or start with empty folders",
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
        """Write a durable version that can be committed."""
        self.require(
            version == self.state.committed + 1,
            f"version {version} was to be prepared",
            f"the next version is {self.state.committed + 1}",
            "Prepare versions in sequence",
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
        """Make the prepared version the current one, durably."""
        self.require(
            version == self.state.prepared,
            f"version {version} was to be committed",
            f"the prepared version is {self.state.prepared}",
            "Prepare the version first",
        )
        with self._system_errors():
            notes = self._contents(version)["notes"]
            write_json(self._path / "committed.json", {"version": version})
            self.state = StoreState(version, None, self.state.part)
            self._notes = notes
            discard(self._version(version - 1))

    def notes(self) -> dict[str, str]:
        """Notes of the committed version."""
        return dict(self._notes)

    def join(self, part: RunPart) -> None:
        """Make the store this part of a run, durably."""
        with self._system_errors():
            header = {**self._header, "part": asdict(part)}
            write_json(self._path / "store.json", header)
            self._header = header
            self.state = StoreState(self.state.committed, self.state.prepared, part)

    def close(self) -> None:
        """Release the folder. The working copy stays; the next opening removes it."""
        self._lock.close()

    # ------------------------------------------------------------------ errors

    def require(self, condition: bool, found: str, needed: str, fix: str) -> None:
        """Raise SetupError unless *condition* holds."""
        if not condition:
            raise SetupError(f"the store of rows in {self._path}: {found}, but {needed}. {fix}")

    def damaged(self, what: str) -> SetupError:
        """Error for a folder whose contents differ from the files that were written."""
        return SetupError(
            f"the store of rows in {self._path} is damaged: {what}. Restore the folders of all ranks from copies made"
            " at the same time, or start with empty folders"
        )

    def unwritable(self, what: object) -> SetupError:
        """Error for a full disk, or a folder that cannot be written."""
        return SetupError(
            f"the store of rows in {self._path} cannot be written: {what}; it needs write permission and room for all"
            " changes between two commits. The committed version is intact: free disk space or fix the permissions, and"
            " restart from it"
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
                f"the store of rows in {self._path} is in use by {error} process; expected one user of a rank's folder."
                " Wait until the folder is released, or use another folder"
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
            # The store exists once the last of these files does.
            write_json(self._path / "committed.json", {"version": 0})
            write_json(path, wanted)
            sync_name(self._path)
            return wanted
        except ValueError as error:
            raise self.damaged(str(error)) from error
        differences = list(_differences({key: found.get(key) for key in wanted}, wanted))
        if differences:
            raise SetupError(
                f"the store of rows in {self._path} was created with a different configuration:"
                f" {'; '.join(differences)}. Restore that configuration, or use another folder"
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
        # The previous version may still exist if the process was killed.
        odd = versions - {committed - 1, committed, committed + 1}
        if odd or (committed > 0 and committed not in versions):
            raise self.damaged(
                f"the committed version is {committed}, but the folder has the versions {sorted(versions)}"
            )
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
        """Return the version's contents after checking its files."""
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
                raise self.damaged(f"{name} of version {version} has size and checksum {found}, expected {expected}")
        return contents


def _differences(found: Any, wanted: Any, where: str = "") -> Iterator[str]:
    """Descriptions of the differences between two values of plain types, entry by entry."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted(found.keys() | wanted.keys()):
            inner = f"{where}.{key}" if where else key
            yield from _differences(found.get(key), wanted.get(key), inner)
    elif found != wanted:
        yield f"{where} is {short(found)} in the store and {short(wanted)} here"
