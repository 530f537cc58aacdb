"""Discrete-event simulation: a simulated clock, processes, signals and shared resources.

A process is a generator that stands for a thread. It yields a :class:`Signal` or a :class:`ResourceRequest` to wait
for, and continues when the signal is set or the use is complete.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Generator, Hashable, Iterable
from dataclasses import dataclass
from operator import attrgetter


class Signal:
    """Event that occurs at most once. Processes can wait for it."""

    __slots__ = ("is_set", "waiting")

    def __init__(self) -> None:
        self.is_set = False
        self.waiting: list[Process] = []


@dataclass(slots=True, eq=False)
class ResourceRequest:
    """Use of a resource, in seconds at full speed."""

    resource: SharedResource
    seconds: float


@dataclass(slots=True, eq=False)
class Process:
    """Generator that an :class:`EventLoop` runs."""

    name: Hashable
    body: Generator[Signal | ResourceRequest, None, None]


class SharedResource:
    """Resource that serves all its users at the same speed, ``min(1, lanes / users)``.

    As in fair queueing, a virtual time advances with the service that each user receives. The virtual time at which a
    user finishes is therefore fixed when the user is added, and users finish in the order of these times.
    """

    def __init__(self, name: str, lanes: float) -> None:
        self.name = name
        self.lanes = lanes
        self.due = math.inf  # time at which the next user finishes if no other user is added before
        self._users: list[tuple[float, int, Process]] = []
        self._virtual = 0.0
        self._since = 0.0
        self._speed = 1.0
        self._count = itertools.count()

    def add(self, process: Process, seconds: float, now: float) -> None:
        """Serve *process* for *seconds* at full speed, from *now* on."""
        if self._users:
            self._virtual += (now - self._since) * self._speed
        else:
            self._virtual = 0.0
        heapq.heappush(self._users, (self._virtual + seconds, next(self._count), process))
        self._update_due_time(now)

    def pop_finished(self) -> Process:
        """Remove and return the user that finishes at :attr:`due`."""
        self._virtual, _, process = heapq.heappop(self._users)
        self._update_due_time(self.due)
        return process

    def list_remaining_work(self, now: float) -> list[tuple[Process, float]]:
        """Users, each with the seconds at full speed that remain for it."""
        virtual = self._virtual + (now - self._since) * self._speed
        return [(process, target - virtual) for target, _, process in self._users]

    def _update_due_time(self, now: float) -> None:
        self._since = now
        if not self._users:
            self.due = math.inf
            return
        self._speed = min(1.0, self.lanes / len(self._users))
        self.due = now + max(0.0, self._users[0][0] - self._virtual) / self._speed


class EventLoop:
    """Runs processes in simulated time."""

    def __init__(self, resources: Iterable[SharedResource]) -> None:
        self.now = 0.0
        self.resources = list(resources)
        self._ready: deque[Process] = deque()

    def start_process(self, process: Process) -> None:
        """Run *process*, after the processes that are already ready."""
        self._ready.append(process)

    def set_signal(self, signal: Signal) -> None:
        """Set *signal*, so that all processes that wait for it continue."""
        signal.is_set = True
        self._ready.extend(signal.waiting)
        signal.waiting.clear()

    def run(self) -> None:
        """Run until no process can continue."""
        while True:
            while self._ready:
                self._resume_process(self._ready.popleft())
            resource = min(self.resources, key=attrgetter("due"))
            if resource.due == math.inf:
                return
            self.now = resource.due
            self._ready.append(resource.pop_finished())

    def _resume_process(self, process: Process) -> None:
        for request in process.body:
            if isinstance(request, ResourceRequest):
                request.resource.add(process, request.seconds, self.now)
                return
            if not request.is_set:
                request.waiting.append(process)
                return
