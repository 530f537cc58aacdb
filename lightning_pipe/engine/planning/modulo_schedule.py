"""When each task begins if one iteration begins every so many seconds: modulo scheduling.

A compiler that pipelines a loop looks for a start of each instruction so that, with an iteration begun every *period*,
dependencies hold and no unit is used twice at once, counted modulo the period. The tasks of a training iteration are
such a loop, and threads and resources its units. The method is Rau's iterative modulo scheduling ("Iterative modulo
scheduling: an algorithm for software pipelining loops", 1994), in continuous time: tasks are placed one after the
other, what is in the way of a task that fits nowhere is taken out and placed again later.

Tested in ``tests/engine/planning/test_planner.py``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_ATTEMPTS = 12  # placements per task until it is given up


class Claim(NamedTuple):
    """A task holds *unit* for *seconds*, from *after* its start."""

    unit: Hashable
    after: float
    seconds: float


class Wait(NamedTuple):
    """Task *downstream* starts at least *seconds* after *upstream* of *distance* iterations before; by index."""

    upstream: int
    downstream: int
    seconds: float
    distance: int


@dataclass(frozen=True)
class Loop:
    """What is to be scheduled.

    Args:
        seconds: of each task, from its start to its end.
        claims: what each task holds.
        waits: dependencies.
        aligned: a unit whose work may not go on past a multiple of the period: the thread that walks through periods.
        pause: seconds at the beginning of each period for which *aligned* is taken.
        in_last: tasks that start in the last of the periods that an iteration is in flight.
    """

    seconds: Sequence[float]
    claims: Sequence[Sequence[Claim]]
    waits: Sequence[Wait]
    aligned: Hashable
    pause: float
    in_last: frozenset[int]


def modulo_schedule(loop: Loop, period: float, periods: int, *, by_slack: bool = False) -> list[float] | None:
    """Start of each task, in seconds since its iteration began.

    Args:
        loop: the tasks.
        period: seconds between the beginnings of two iterations.
        periods: for how many of them an iteration may be in flight.
        by_slack: place the tasks with the least freedom first, rather than those with the longest way to the end.

    Returns:
        None where none was found, which does not mean that there is none.
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
        """Earliest and latest starts that dependencies alone leave; whether there are any."""
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
            # By force, and not again where it was before.
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
        """The first start from *earliest* at which nothing is in the way."""
        start = earliest
        last = min(self.latest[task], earliest + self.period)
        while start <= last + self.epsilon:
            move = max(self._misaligned(task, start), self._blocked(task, start)[0])
            if not move:
                return start
            start += move
        return None

    def _blocked(self, task: int, start: float) -> tuple[float, list[int]]:
        """How much later to try again, 0 if nothing is in the way, and the tasks that are."""
        move, others = 0.0, []
        for unit, after, seconds in self.loop.claims[task]:
            for other, other_start in self.starts.items():
                for other_unit, other_after, other_seconds in self.loop.claims[other]:
                    if other_unit != unit or other == task:
                        continue
                    # How long after this claim's begin the other one's comes, around the circle.
                    ahead = (other_start + other_after - start - after) % self.period
                    if ahead > self.period - self.epsilon:
                        ahead = 0.0
                    if ahead < seconds - self.epsilon or self.period - ahead < other_seconds - self.epsilon:
                        others.append(other)
                        past = (ahead + other_seconds) % self.period
                        move = max(move, past if past > self.epsilon else self.period)
        return move, list(dict.fromkeys(others))

    def _misaligned(self, task: int, start: float) -> float:
        """How much later the task has to start for its work on the aligned unit to stay inside a period."""
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
