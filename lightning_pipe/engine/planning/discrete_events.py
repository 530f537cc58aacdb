"""A clock that is not the wall's: generators as threads, the signals they wait for and the resources they share.

Discrete-event simulation in its process form: a process is a generator that yields what it waits for, a
:class:`Signal` or some :class:`ResourceUse`, and goes on when that has come.

Tested in ``tests/engine/planning/test_simulation.py``.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Generator, Hashable, Iterable


class Signal:
    """Something that happens once."""

    __slots__ = ("is_set", "waiting")

    def __init__(self) -> None:
        self.is_set = False
        self.waiting: list[Process] = []


class ResourceUse:
    """So much of a resource, in seconds at its full speed."""

    __slots__ = ("resource", "seconds")

    def __init__(self, resource: SharedResource, seconds: float) -> None:
        self.resource = resource
        self.seconds = seconds


class Process:
    """A generator that runs in a :class:`Clock`."""

    __slots__ = ("body", "name")

    def __init__(self, name: Hashable) -> None:
        self.name = name
        self.body: Generator[Signal | ResourceUse, None, None] | None = None


class SharedResource:
    """Serves all who use it at the same speed: each gets ``min(1, lanes / users)``.

    Users are ordered by the virtual time at which they will have had what they need: since all advance at one speed,
    what each has still to get, less what it gets in common, never changes (as in fair queueing).
    """

    def __init__(self, name: str, lanes: float) -> None:
        self.name = name
        self.lanes = lanes
        self.due = math.inf  # when the next user is done, if none comes before
        self._users: list[tuple[float, int, Process]] = []
        self._virtual = 0.0
        self._since = 0.0
        self._speed = 1.0
        self._count = itertools.count()

    def add(self, process: Process, seconds: float, now: float) -> None:
        """Let *process* have so much from *now* on."""
        if self._users:
            self._virtual += (now - self._since) * self._speed
        else:
            self._virtual = 0.0
        heapq.heappush(self._users, (self._virtual + seconds, next(self._count), process))
        self._go_on(now)

    def done(self) -> Process:
        """Take out the user that is done at :attr:`due`."""
        self._virtual, _, process = heapq.heappop(self._users)
        self._go_on(self.due)
        return process

    def remaining(self, now: float) -> list[tuple[Process, float]]:
        """The users, and what each has still to get."""
        virtual = self._virtual + (now - self._since) * self._speed
        return [(process, target - virtual) for target, _, process in self._users]

    def _go_on(self, now: float) -> None:
        self._since = now
        if not self._users:
            self.due = math.inf
            return
        self._speed = min(1.0, self.lanes / len(self._users))
        self.due = now + max(0.0, self._users[0][0] - self._virtual) / self._speed


class Clock:
    """Runs processes.

    Args:
        resources: all that they use.
    """

    def __init__(self, resources: Iterable[SharedResource]) -> None:
        self.now = 0.0
        self.resources = list(resources)
        self._ready: deque[Process] = deque()

    def start(self, process: Process, body: Generator[Signal | ResourceUse, None, None]) -> None:
        """Let *process* run *body*, once those that are ready have run."""
        process.body = body
        self._ready.append(process)

    def set(self, signal: Signal) -> None:
        """Let what waits for *signal* continue."""
        signal.is_set = True
        self._ready.extend(signal.waiting)
        signal.waiting.clear()

    def run(self) -> None:
        """Run until nothing moves any more."""
        while True:
            while self._ready:
                self._step(self._ready.popleft())
            resource = min(self.resources, key=_due)
            if resource.due == math.inf:
                return
            self.now = resource.due
            self._ready.append(resource.done())

    def _step(self, process: Process) -> None:
        assert process.body is not None
        for wanted in process.body:
            if isinstance(wanted, ResourceUse):
                wanted.resource.add(process, wanted.seconds, self.now)
                return
            if not wanted.is_set:
                wanted.waiting.append(process)
                return


def _due(resource: SharedResource) -> float:
    return resource.due
