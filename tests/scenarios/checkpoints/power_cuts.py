"""States that a folder may be in after a power cut at any moment of a recording, and what a reader makes of each.

The model promises what POSIX does and no more: bytes of a file are there once the file was synced, a name once its
folder was. What was not synced is lost or kept, independently of all else: bytes whole, in part, or as zeros. Names
that change in one call change together, and the changes of one name are kept in order.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.scenarios.checkpoints.disk_recorder import Change, Entry, Event, Node, Point, Recording, Sync, Tree, Write

__all__ = ["Broken", "Replay"]

_SEED = 20
_RANDOM = 8  # random subsets for each moment
_PAIRS = 40  # pairs of lost changes for each moment, all where there are no more


@dataclass(frozen=True)
class Broken:
    """A state that is none of those promised.

    Attributes:
        moment: number of events before the power cut.
        lost: what was not kept.
        found: what the reader made of it.
        promised: names of the points that it could have been.
    """

    moment: int
    lost: str
    found: Any
    promised: tuple[str, ...]


class Replay:
    """A recording, and the reader of what it leaves.

    Args:
        recording: its points are the promised states.
        read: of a folder, anything that can be compared; what it raises is a value that no point has.
        folder: where states are put to be read.
        ignored: names that are left out when states are compared, since no reader looks at them.
    """

    def __init__(
        self, recording: Recording, read: Callable[[Path], Any], folder: Path, ignored: Collection[str] = ()
    ) -> None:
        self._recording = recording
        self._read = read
        self._folder = folder
        self._ignored = frozenset(ignored)
        self._known: dict[Any, Any] = {}
        self.states = 0
        self._points = [(place, event.name) for place, event in enumerate(recording.events) if isinstance(event, Point)]
        assert self._points, "a recording without a point promises nothing"
        self._values = {
            name: self._outcome(_Disk(recording, recording.events[:place]).state()) for place, name in self._points
        }

    @property
    def sites(self) -> dict[str, list[int]]:
        """Places of syncs in the recording, by what asked for them."""
        found: dict[str, list[int]] = {}
        for place, event in enumerate(self._recording.events):
            if isinstance(event, Sync):
                found.setdefault(event.site, []).append(place)
        return found

    def value(self, name: str) -> Any:
        """What the reader makes of a promised state."""
        return self._values[name]

    def broken(self) -> Iterator[Broken]:
        """States that are not promised."""
        for moment in range(len(self._recording.events) + 1):
            disk = _Disk(self._recording, self._recording.events[:moment])
            yield from self._check(disk, moment, disk.states())

    def without(self, sync: int) -> Broken | None:
        """The first broken state if one sync were not there; None where nobody would notice."""
        events = self._recording.events
        for moment in range(sync + 1, len(events) + 1):
            before = events[:moment]
            kept, disk = _Disk(self._recording, before), _Disk(self._recording, before, without=sync)
            lost = disk.single_losses(but=kept)
            for found in self._check(disk, moment, lost):
                return found
            if not disk.exceeds(kept):
                return None  # a later sync has done it
        return None

    def _check(self, disk: _Disk, moment: int, states: Iterator[tuple[str, Tree]]) -> Iterator[Broken]:
        promised = self._promised(moment)
        for lost, tree in states:
            found = self._outcome(tree)
            if all(found != self._values[name] for name in promised):
                yield Broken(moment, lost, found, promised)

    def _promised(self, moment: int) -> tuple[str, ...]:
        """At a point its state; after it that, or the next point's."""
        past = [(place, name) for place, name in self._points if place < moment]
        if past and past[-1][0] == moment - 1:
            return (past[-1][1],)
        following = [name for place, name in self._points if place >= moment][:1]
        return (*(name for _, name in past[-1:]), *following)

    def _outcome(self, tree: Tree) -> Any:
        key = self._key(tree, 0)
        if key not in self._known:
            self.states += 1
            shutil.rmtree(self._folder, ignore_errors=True)
            _put(tree, 0, self._folder)
            try:
                self._known[key] = self._read(self._folder)
            except Exception as error:
                self._known[key] = f"{type(error).__name__}: {error}"
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._known[key]

    def _key(self, tree: Tree, node: Node) -> Any:
        if node in tree.folders:
            names = sorted((name, child) for name, child in tree.folders[node].items() if name not in self._ignored)
            return tuple((name, self._key(tree, child)) for name, child in names)
        return tree.files[node]


class _Disk:
    """What is on disk for sure, and what may be, after some events."""

    def __init__(self, recording: Recording, events: Sequence[Event], without: int | None = None) -> None:
        self._before = recording.before
        self._changes: list[Change] = []
        # A file has no bytes until its first write.
        self._contents = {event.node: [b""] for event in recording.events if isinstance(event, Write)}
        self._contents |= {node: [text] for node, text in recording.before.files.items()}
        self._links = recording.links
        self._kept: set[int] = set()
        for place, event in enumerate(events):
            if isinstance(event, Change):
                self._changes.append(event)
            elif isinstance(event, Write):
                kept = [] if event.synced else self._contents[event.node]
                self._contents[event.node] = [*kept, event.content]
            elif isinstance(event, Sync) and place != without:
                if event.node in self._contents:
                    self._contents[event.node] = self._contents[event.node][-1:]
                touching = (i for i, c in enumerate(self._changes) if any(e[0] == event.node for e, _ in c.entries))
                self._kept.update(touching)
        # Where one change of a name is kept, those before it are.
        for place in sorted(self._kept, reverse=True):
            self._kept |= self._before_of(place)
        self._free = [place for place in range(len(self._changes)) if place not in self._kept]
        self._unsure = [node for node, contents in self._contents.items() if len(contents) > 1]

    def state(self, lost: Collection[int] = (), contents: dict[Node, bytes] | None = None) -> Tree:
        """The folder without some changes, and with these bytes in place of the last ones."""
        tree = Tree({node: dict(names) for node, names in self._before.folders.items()}, {}, self._links)
        for place, change in enumerate(self._changes):
            if place in lost:
                continue
            for (folder, name), node in change.entries:
                names = tree.folders.setdefault(folder, {})
                if node is None:
                    names.pop(name, None)
                else:
                    names[name] = node
                    if node not in self._contents:
                        tree.folders.setdefault(node, {})
        tree.files = {node: versions[-1] for node, versions in self._contents.items()} | (contents or {})
        return tree

    def exceeds(self, other: _Disk) -> bool:
        """Whether more may be lost than of *other*."""
        return self._free != other._free or self._contents != other._contents

    def single_losses(self, but: _Disk | None = None) -> Iterator[tuple[str, Tree]]:
        """All kept, without one change or a file's bytes; leaving out those that may be lost of another disk, too."""
        for place in self._free:
            if but is None or place not in but._free:
                yield self._told([place]), self.state(self._with_after([place]))
        for node in self._unsure:
            if but is None or self._contents[node] != but._contents[node]:
                for kind, content in self._variants(node):
                    yield f"bytes of {self._name(node)} ({kind})", self.state((), {node: content})

    def states(self) -> Iterator[tuple[str, Tree]]:
        """Every single loss, pairs of lost changes, all lost, all but one lost, and random subsets."""
        yield "nothing", self.state()
        yield from self.single_losses()
        old = {node: self._contents[node][0] for node in self._unsure}
        yield "all bytes", self.state((), old)
        yield "all changes", self.state(self._free)
        yield "everything", self.state(self._free, old)
        for place in self._free:
            kept = {place} | self._before_of(place)
            lost = [other for other in self._free if other not in kept]
            yield f"everything but {self._told([place])}", self.state(lost)
        drawn = random.Random(_SEED * 1000 + len(self._changes))
        pairs = list(itertools.combinations(self._free, 2))
        for pair in pairs if len(pairs) <= _PAIRS else drawn.sample(pairs, _PAIRS):
            yield self._told(pair), self.state(self._with_after(pair))
        for _ in range(_RANDOM if self._free or self._unsure else 0):
            lost_ones = [place for place in self._free if drawn.random() < 0.5]
            contents = {
                node: drawn.choice(list(self._variants(node)))[1] for node in self._unsure if drawn.random() < 0.5
            }
            yield f"{self._told(lost_ones)}, {len(contents)} files", self.state(self._with_after(lost_ones), contents)

    def _variants(self, node: Node) -> Iterator[tuple[str, bytes]]:
        """What a file may have whose last bytes were not synced."""
        *older, last = self._contents[node]
        for number, content in enumerate(older):
            yield f"as {len(older) - number} writes ago", content
        half = len(last) // 2
        yield "cut in half", last[:half]
        yield "zeros after the half", last[:half] + bytes(len(last) - half)
        yield "zeros", bytes(len(last))

    def _entries(self, place: int) -> set[Entry]:
        return {entry for entry, _ in self._changes[place].entries}

    def _before_of(self, place: int) -> set[int]:
        """Changes of the same names before it, and of theirs."""
        needed, entries = set(), self._entries(place)
        for other in range(place - 1, -1, -1):
            if entries & self._entries(other):
                needed.add(other)
                entries |= self._entries(other)
        return needed

    def _with_after(self, places: Collection[int]) -> set[int]:
        """The changes, and those that cannot be kept without them."""
        lost = set(places)
        for other in range(min(places, default=len(self._changes)), len(self._changes)):
            if any(one < other and self._entries(one) & self._entries(other) for one in lost):
                lost.add(other)
        assert not lost & self._kept
        return lost

    def _told(self, places: Collection[int]) -> str:
        return "; ".join(
            f"{self._changes[place].call} of {', '.join(name for (_, name), _ in self._changes[place].entries)}"
            for place in places
        )

    def _name(self, node: Node) -> str:
        names = [name for change in self._changes for (_, name), child in change.entries if child == node]
        return names[-1] if names else str(node)


def _put(tree: Tree, node: Node, path: Path) -> None:
    if node in tree.folders:
        path.mkdir()
        for name, child in tree.folders[node].items():
            _put(tree, child, path / name)
    elif node in tree.links:
        path.symlink_to(tree.files[node].decode())
    else:
        path.write_bytes(tree.files[node])
