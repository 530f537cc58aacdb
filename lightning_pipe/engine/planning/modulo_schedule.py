"""Modulo scheduling: start times of tasks when an iteration starts once every period.

A compiler that pipelines a loop starts an iteration every *period*. It chooses the start of each instruction such that
dependencies hold and no two instructions use a unit at the same time modulo the period. Here the tasks of a training
iteration are the instructions, and threads and resources are the units. The method is iterative modulo scheduling (Rau,
"Iterative modulo scheduling: an algorithm for software pipelining loops", 1994) in continuous time. Tasks are placed
one after the other. If a task does not fit, the tasks in conflict with it are removed and placed again later.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_ATTEMPTS = 12  # placements per task, on average, before the search fails


class Claim(NamedTuple):
    """Use of *unit* by a task for *seconds*, which begins *after* seconds after the start of the task."""

    unit: Hashable
    after: float
    seconds: float


class Wait(NamedTuple):
    """Task *downstream* starts at least *seconds* after the start of *upstream* of *distance* iterations earlier.

    Both tasks are given by index.
    """

    upstream: int
    downstream: int
    seconds: float
    distance: int


@dataclass(frozen=True)
class Loop:
    """Tasks to schedule.

    Args:
        seconds: duration of each task.
        claims: units that each task uses.
        waits: dependencies between tasks.
        aligned: unit whose work must not cross a multiple of the period. This is the thread that runs the periods.
        pause: seconds at the start of each period for which *aligned* is occupied.
        in_last: tasks that start in the last period in which their iteration is in flight.
    """

    seconds: Sequence[float]
    claims: Sequence[Sequence[Claim]]
    waits: Sequence[Wait]
    aligned: Hashable
    pause: float
    in_last: frozenset[int]


def modulo_schedule(loop: Loop, period: float, periods: int, *, by_slack: bool = False) -> list[float] | None:
    """Start of each task, in seconds since the start of its iteration.

    Args:
        loop: tasks to schedule.
        period: seconds between the starts of two iterations.
        periods: number of periods for which an iteration may be in flight.
        by_slack: True to place the tasks with the least slack first (default False: the tasks with the longest path to
            the end first).

    Returns:
        The starts, or None if no schedule was found. A schedule may exist nevertheless.
    """
    return _Schedule(loop, period, periods).found(by_slack)


class _Schedule:
    def __init__(self, loop: Loop, period: float, periods: int) -> None:
        self.loop = loop
        self.period = period
        self.end = period * periods
        self.epsilon = 1e-9 * period
        self.count = len(loop.seconds)
        first_start = self.end - period
        self.earliest = [first_start if task in loop.in_last else 0.0 for task in range(self.count)]
        self.latest = [self.end - seconds for seconds in loop.seconds]
        self.starts: dict[int, float] = {}
        self.tried: dict[int, float] = {}

    def found(self, by_slack: bool) -> list[float] | None:
        if not self._bounds_settle():
            return None
        rank = [
            (self.latest[task] - self.earliest[task] if by_slack else self.latest[task], self.latest[task], task)
            for task in range(self.count)
        ]
        for _ in range(_ATTEMPTS * self.count):
            if len(self.starts) == self.count:
                return [self.starts[task] for task in range(self.count)]
            task = min((task for task in range(self.count) if task not in self.starts), key=rank.__getitem__)
            if not self._place(task):
                return None
        return None

    def _bounds_settle(self) -> bool:
        """Compute the earliest and latest starts that dependencies allow. Return True if every task can start."""
        for _ in range(self.count + 1):
            settled = True
            for up, down, seconds, distance in self.loop.waits:
                gap = seconds - distance * self.period
                if self.earliest[up] + gap > self.earliest[down] + self.epsilon:
                    self.earliest[down], settled = self.earliest[up] + gap, False
                if self.latest[down] - gap < self.latest[up] - self.epsilon:
                    self.latest[up], settled = self.latest[down] - gap, False
            if settled:
                return all(first <= last + self.epsilon for first, last in zip(self.earliest, self.latest, strict=True))
        return False

    def _place(self, task: int) -> bool:
        earliest = self.earliest[task]
        for up, down, seconds, distance in self.loop.waits:
            if down == task and up in self.starts:
                earliest = max(earliest, self.starts[up] + seconds - distance * self.period)
        start = self._free_from(task, earliest)
        if start is None:
            # Place the task in spite of conflicts, later than its previous start so that the search makes progress.
            start = earliest
            if task in self.tried and self.tried[task] >= start - self.epsilon:
                start = self.tried[task] + max(self._blocked(task, self.tried[task])[0], self.period / 16)
            if start > self.latest[task] + self.epsilon:
                start = earliest
            start += self._misaligned(task, start)
            if start > self.latest[task] + self.epsilon:
                return False
            for other in self._blocked(task, start)[1]:
                del self.starts[other]
        self.starts[task] = self.tried[task] = start
        for up, down, seconds, distance in self.loop.waits:
            gap = seconds - distance * self.period
            if up == task and down in self.starts and self.starts[down] < start + gap - self.epsilon and down != task:
                del self.starts[down]
        return True

    def _free_from(self, task: int, earliest: float) -> float | None:
        """First start from *earliest* without conflicts; None if no start is possible."""
        start = earliest
        last = min(self.latest[task], earliest + self.period)
        while start <= last + self.epsilon:
            move = max(self._misaligned(task, start), self._blocked(task, start)[0])
            if not move:
                return start
            start += move
        return None

    def _blocked(self, task: int, start: float) -> tuple[float, list[int]]:
        """Seconds by which to delay the start before the next try (0 without conflicts), and the tasks in conflict."""
        move, others = 0.0, []
        for unit, after, seconds in self.loop.claims[task]:
            for other, other_start in self.starts.items():
                for other_unit, other_after, other_seconds in self.loop.claims[other]:
                    if other_unit != unit or other == task:
                        continue
                    # Seconds from the start of this claim to the next start of the other one, modulo the period.
                    ahead = (other_start + other_after - start - after) % self.period
                    if ahead > self.period - self.epsilon:
                        ahead = 0.0
                    if ahead < seconds - self.epsilon or self.period - ahead < other_seconds - self.epsilon:
                        others.append(other)
                        past = (ahead + other_seconds) % self.period
                        move = max(move, past if past > self.epsilon else self.period)
        return move, list(dict.fromkeys(others))

    def _misaligned(self, task: int, start: float) -> float:
        """Seconds by which to delay the start so that the work on the aligned unit stays inside a period."""
        for unit, after, seconds in self.loop.claims[task]:
            if unit == self.loop.aligned:
                begin = (start + after) % self.period
                if begin > self.period - self.epsilon:
                    begin = 0.0
                if begin < self.loop.pause - self.epsilon:
                    return self.loop.pause - begin
                if begin + seconds > self.period + self.epsilon:
                    return self.period - begin + self.loop.pause
        return 0.0
