"""Recorder of what a piece of code does to a folder: its writes, syncs, renames, links and removals, in order.

System calls for names and syncs are intercepted in Python. Bytes are not: the folder is compared with what was seen
last, before and after each of these calls, so that files written from C++ are recorded too, and nothing escapes. A
removal or rename that no intercepted call has made fails the recording, except where the caller allows it.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

__all__ = ["Change", "Point", "Recording", "Sync", "Write", "recorded"]

# Identity of a file or folder for as long as any name leads to it. The recorded folder itself is 0.
Node = int
Entry = tuple[Node, str]


@dataclass(frozen=True)
class Change:
    """Names that change together, in one step: None where there is no such name any more."""

    entries: tuple[tuple[Entry, Node | None], ...]
    call: str


@dataclass(frozen=True)
class Write:
    """The bytes that a file has from now on."""

    node: Node
    content: bytes
    synced: bool  # by an engine that is trusted to


@dataclass(frozen=True)
class Sync:
    """A sync of a file's bytes or of a folder's names, and the functions of the package that asked for it."""

    node: Node
    site: str


@dataclass(frozen=True)
class Point:
    """A moment from which on a state is promised, whatever happens."""

    name: str


Event = Change | Write | Sync | Point


@dataclass
class Tree:
    """Names and bytes below a folder; symbolic links are files whose bytes are where they point."""

    folders: dict[Node, dict[str, Node]] = field(default_factory=dict)
    files: dict[Node, bytes] = field(default_factory=dict)
    links: set[Node] = field(default_factory=set)


@dataclass
class Recording:
    """What was there at first, and what happened."""

    before: Tree
    after: Tree
    events: list[Event]
    mark: Callable[[str], None]

    @property
    def links(self) -> set[Node]:
        """Files that are symbolic links."""
        return self.before.links | self.after.links


@contextmanager
def recorded(
    root: Path,
    engine: Callable[[str], bool] = lambda path: False,
    trusted: Callable[[str], bool] = lambda path: False,
) -> Iterator[Recording]:
    """Record what happens below *root*, which is there.

    Args:
        root: the folder.
        engine: of a path relative to it, whether names below come and go without Python.
        trusted: of a path relative to it, whether the bytes of the file are synced by what wrote them.
    """
    recorder = _Recorder(root, engine, trusted)
    with pytest.MonkeyPatch.context() as patch:
        recorder.install(patch)
        yield recorder.recording
    recorder.settle()


class _Recorder:
    def __init__(self, root: Path, engine: Callable[[str], bool], trusted: Callable[[str], bool]) -> None:
        self._root = Path(os.path.realpath(root))
        self._engine, self._trusted = engine, trusted
        self._lock = threading.RLock()
        self._nodes: dict[tuple[int, int], Node] = {}
        self._made = 0
        self._seen = self._look()
        self.recording = Recording(self._seen, self._seen, [], self._mark)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, functools.partial(self._sync, getattr(os, name)))
        for name in ("rename", "replace", "link"):
            patch.setattr(os, name, functools.partial(self._two_names, getattr(os, name), name))
        for name in ("unlink", "remove", "rmdir", "mkdir"):
            patch.setattr(os, name, functools.partial(self._one_name, getattr(os, name), name))

    def settle(self) -> None:
        """Record what has happened since the last look."""
        with self._lock:
            found = self._look()
            self._compare(found, set(), "")

    # ------------------------------------------------------------------ calls

    def _mark(self, name: str) -> None:
        with self._lock:
            self.settle()
            self.recording.events.append(Point(name))

    def _sync(self, call: Callable[[int], None], descriptor: int) -> None:
        with self._lock:
            self.settle()
            call(descriptor)
            found = os.fstat(descriptor)
            node = self._nodes.get((found.st_dev, found.st_ino))
            if node is not None:
                self.recording.events.append(Sync(node, _site()))

    def _two_names(self, call: Callable[..., None], name: str, source: Any, target: Any, **options: Any) -> None:
        entries = {self._entry(source, options.get("src_dir_fd")), self._entry(target, options.get("dst_dir_fd"))}
        self._with_names(lambda: call(source, target, **options), name, entries)

    def _one_name(self, call: Callable[..., None], name: str, path: Any, *arguments: Any, **options: Any) -> None:
        entries = {self._entry(path, options.get("dir_fd"))}
        self._with_names(lambda: call(path, *arguments, **options), name, entries)

    def _with_names(self, call: Callable[[], None], name: str, entries: set[Path]) -> None:
        with self._lock:
            self.settle()
            call()
            self._compare(self._look(), entries, name)

    def _entry(self, path: Any, folder: int | None) -> Path:
        """The path whose folder is followed through links, and whose last name is not."""
        whole = Path(os.fsdecode(path))
        if folder is not None:
            whole = Path(os.readlink(f"/proc/self/fd/{folder}")) / whole
        return Path(os.path.realpath(whole.parent)) / whole.name

    # ------------------------------------------------------------------ what there is

    def _look(self) -> Tree:
        tree, nodes = Tree(), {}

        def node_of(found: os.stat_result) -> Node:
            key = (found.st_dev, found.st_ino)
            if key not in nodes:
                nodes[key] = self._nodes.get(key, self._made)
                self._made += nodes[key] == self._made
            return nodes[key]

        def walk(folder: Path, node: Node) -> None:
            names = tree.folders[node] = {}
            for name in sorted(os.listdir(folder)):
                try:
                    found = os.lstat(folder / name)
                    if stat.S_ISDIR(found.st_mode):
                        names[name] = node_of(found)
                        walk(folder / name, names[name])
                        continue
                    link = stat.S_ISLNK(found.st_mode)
                    content = os.fsencode(os.readlink(folder / name)) if link else (folder / name).read_bytes()
                except FileNotFoundError:  # of the engine's own threads
                    names.pop(name, None)
                    continue
                names[name] = node_of(found)
                tree.files[names[name]] = content
                if link:
                    tree.links.add(names[name])

        walk(self._root, node_of(os.lstat(self._root)))
        self._nodes = nodes
        return tree

    def _compare(self, found: Tree, called: set[Path], call: str) -> None:
        """Record the differences; the names in *called* change together."""
        before, self._seen, self.recording.after = self._seen, found, found
        together: list[tuple[Entry, Node | None]] = []
        others: list[tuple[Entry, Node | None, str]] = []
        paths = {**_paths(before), **_paths(found)}
        for node in before.folders | found.folders:
            old, new = before.folders.get(node, {}), found.folders.get(node, {})
            if node not in found.folders:
                continue  # it was removed, empty or with all that was in it
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) == new.get(name):
                    continue
                path = f"{paths[node]}/{name}".removeprefix("/")
                entry = ((node, name), new.get(name))
                if self._root / path in called:
                    together.append(entry)
                else:
                    others.append((*entry, path))
        self._record_others(before, others)
        if together:
            self.recording.events.append(Change(tuple(together), call))
        for node, content in found.files.items():
            if before.files.get(node) != content:
                synced = self._trusted(_path_of(found, node))
                self.recording.events.append(Write(node, content, synced))

    def _record_others(self, before: Tree, others: list[tuple[Entry, Node | None, str]]) -> None:
        events = self.recording.events
        swapped = [(entry, node) for entry, node, _ in others if node is not None and _is(before, entry)]
        if len(others) == len(swapped) == 2 and _was(before, swapped[0][0]) == swapped[1][1]:
            events.append(Change(tuple(swapped), "exchange"))
            return
        for entry, node, path in others:
            if not self._engine(path):
                assert node is not None, f"{path} was removed or renamed, and no recorded call has done it"
                assert not _is(before, entry), f"{path} was replaced, and no recorded call has done it"
            events.append(Change(((entry, node),), "engine" if self._engine(path) else "create"))


def _paths(tree: Tree) -> dict[Node, str]:
    found = {0: ""}
    for node in _downwards(tree, 0):
        for name, child in tree.folders[node].items():
            if child in tree.folders:
                found[child] = f"{found[node]}/{name}"
    return found


def _downwards(tree: Tree, node: Node) -> Iterator[Node]:
    yield node
    for child in tree.folders[node].values():
        if child in tree.folders:
            yield from _downwards(tree, child)


def _path_of(tree: Tree, node: Node) -> str:
    paths = _paths(tree)
    return next(
        f"{paths[folder]}/{name}".removeprefix("/")
        for folder, names in tree.folders.items()
        for name, child in names.items()
        if child == node
    )


def _was(before: Tree, entry: Entry) -> Node | None:
    return before.folders.get(entry[0], {}).get(entry[1])


def _is(before: Tree, entry: Entry) -> bool:
    return _was(before, entry) is not None


def _site() -> str:
    """Functions on the stack that are the package's or of PyTorch's checkpoints, innermost first."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(("lightning_pipe.", "torch.distributed.checkpoint")):
            found.append(f"{name.rpartition('.')[2]}.{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found[:4])
