"""Random task graphs whose costs are known: for a simulator and a planner, and to run for real.

For real, network, disk and copies are links that make a thread wait on a timer, shared fairly by all who use them at
once, and compute is a kernel that releases the interpreter lock and has a core for a known time, on as many of the
cores as the graph's machine has. A task's function takes what its
:class:`~lightning_pipe.engine.planning.costs.TaskCost` says.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, State, TaskSchedule
from lightning_pipe.engine.planning.costs import Machine, Resource, TaskCost
from lightning_pipe.engine.planning.planner import propose_plan_variants

# How much of what a wait was late by is taken over into what later ones are expected to be late by.
_LEARNED = 0.1


@dataclass(frozen=True)
class Graph:
    """Tasks with known costs, the machine that they are meant for, and limits of their plans.

    Tasks of *on_workers* may be moved ahead and to workers. At most *max_in_flight* batches are in flight.
    """

    name: str
    tasks: list[PipelineTask]
    costs: dict[str, TaskCost]
    machine: Machine
    on_workers: frozenset[str]
    max_in_flight: int

    def serial_plan(self) -> PipelinePlan:
        return PipelinePlan([(task, TaskSchedule()) for task in self.tasks], name="serial")

    def variants(self, keep: int = 5) -> list[PipelinePlan]:
        """Plans that the planner makes of the serial one, best first."""
        return propose_plan_variants(
            [self.serial_plan()],
            self.costs,
            self.machine,
            movable=self.on_workers,
            on_workers=self.on_workers,
            max_in_flight=self.max_in_flight,
            max_variants=keep,
        )


class Link:
    """A resource of one lane on which waiting is all the work; users share it fairly.

    The arithmetic is that of fair queueing: with *n* users virtual time runs at 1/n of the clock's speed, and a user is
    done when it has advanced by what the user needs.

    A wait with a time limit ends late, on a virtual machine by a tenth of a millisecond and more; by as much as such
    waits were late before, a thread is woken up early.
    """

    def __init__(self) -> None:
        self._late = 0.0
        self._changed = threading.Condition()
        self._virtual = 0.0
        self._since = 0.0
        self._users: list[float] = []

    def begin(self, seconds: float) -> float:
        """Take up work of that many seconds; returns what :meth:`wait` needs."""
        with self._changed:
            self._advance()
            target = self._virtual + seconds
            heapq.heappush(self._users, target)
            self._changed.notify_all()  # for the others it takes longer now
            return target

    def wait(self, target: float) -> None:
        """Wait until that work is done."""
        with self._changed:
            while True:
                self._advance()
                if self._virtual >= target - 1e-9:
                    return
                # Until the next of all is done: from then on the others go on faster.
                limit = (self._users[0] - self._virtual) * len(self._users) - self._late
                begin = time.perf_counter()
                if not self._changed.wait(limit) and limit > 0:
                    self._late += _LEARNED * (time.perf_counter() - begin - limit - self._late)

    def _advance(self) -> None:
        now = time.perf_counter()
        while self._users:
            until = self._since + (self._users[0] - self._virtual) * len(self._users)
            if until > now:
                self._virtual += (now - self._since) / len(self._users)
                break
            self._since, self._virtual = until, heapq.heappop(self._users)
        self._since = now


class Kernel:
    """Compute of a known duration: it works until it has had a core for so long.

    It does so without the interpreter lock, and in registers alone: two of them on two cores do not slow each other.
    How fast a core is makes no difference: on a virtual machine that changes from moment to moment, by a third.
    """

    def __init__(self) -> None:
        rounds, begin = 50_000, time.thread_time()
        self._run(rounds)
        self._seconds_per_round = (time.thread_time() - begin) / rounds

    def __call__(self, seconds: float) -> None:
        end = time.thread_time() + seconds
        # Half of what is left, again and again: should the core become slower meanwhile, it is not more than all.
        while (left := end - time.thread_time()) > 40e-6:
            self._run(max(1, int(left / 2 / self._seconds_per_round)))
        if left > 0:
            self._run(max(1, int(left / self._seconds_per_round)))

    @staticmethod
    def _run(rounds: int) -> None:
        hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)


class Cores:
    """So many of the machine's cores: those who compute on them share them as the system shares cores, fairly.

    Where the system has no say in which cores a thread runs on, no more compute at once than there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._lanes = threading.Semaphore(count)

    @contextmanager
    def used(self) -> Iterator[None]:
        """The calling thread computes on them."""
        if not hasattr(os, "sched_setaffinity"):
            with self._lanes:
                yield
            return
        every = os.sched_getaffinity(0)
        if len(every) <= self._count:
            yield
            return
        os.sched_setaffinity(0, sorted(every)[-self._count :])
        try:
            yield
        finally:
            os.sched_setaffinity(0, every)


def random_graph(seed: int, *, most_tasks: int = 9, unit: float = 1e-3, kernel: Kernel | None = None) -> Graph:
    """A graph of four to *most_tasks* tasks.

    The last one is run by the caller, like an optimizer step, and leaves state to a task of the next iteration.
    """
    draw = random.Random(seed)
    count = draw.randint(4, most_tasks)
    cores = draw.choice([1, 2])
    links = {name: Link() for name in ("network", "disk", "copy")}
    lanes = Cores(cores)
    costs: dict[str, TaskCost] = {}
    fields: list[tuple[list[str], list[str]]] = []  # what each reads and writes
    for index in range(count - 1):
        resource: Resource = draw.choices(("compute", "network", "disk", "copy"), (5, 3, 2, 2))[0]
        seconds = draw.randint(2, 12) * unit
        reads = draw.sample(
            [f"x{before}" for before in range(max(0, index - 3), index)], min(index, draw.randint(1, 2))
        )
        name = f"{resource}{index}"
        costs[name] = TaskCost(seconds, resource)
        fields.append((reads or ["batch"], [f"x{index}"]))
    if draw.random() < 0.4:  # one exchange goes on in the background
        _go_on_in_background(costs, fields, draw, unit)
    names = list(costs)
    used = {name for reads, _ in fields for name in reads}
    left = [f"x{index}" for index in range(count - 1) if f"x{index}" not in used]
    costs["step"] = TaskCost(draw.randint(2, 8) * unit)
    fields.append(([*left, State("parameters")], [State("parameters")]))
    # As in training: the first half of an iteration brings its input, what outlives it is touched in the second.
    half = range(len(names) // 2, len(names))
    fields[draw.choice(half)][0].append(State("parameters"))
    if len(half) > 1 and draw.random() < 0.5:
        early, late = sorted(draw.sample(half, 2))
        fields[early][0].append(State("tables"))
        fields[late][1].append(State("tables"))
    tasks = [
        PipelineTask(name, _function(name, costs, links, lanes, kernel), reads=reads, writes=writes)
        for name, (reads, writes) in zip(costs, fields, strict=True)
    ]
    return Graph(f"graph {seed}", tasks, costs, Machine(cores=cores), frozenset(names), draw.randint(3, 4))


def _go_on_in_background(
    costs: dict[str, TaskCost], fields: list[tuple[list[str], list[str]]], draw: random.Random, unit: float
) -> None:
    """Let a task submit an exchange that the first of those which read its field waits for."""
    names = list(costs)
    pairs = [
        (early, late)
        for early, (_, written) in enumerate(fields)
        for late, (reads, _) in enumerate(fields)
        if late > early and set(written) & set(reads)
    ]
    if pairs:
        early, late = draw.choice(pairs)
        cost = costs[names[early]]
        seconds = draw.randint(2, 8) * unit
        costs[names[early]] = TaskCost(cost.seconds, cost.resource, seconds, waited_by=names[late])


def _function(
    name: str,
    costs: dict[str, TaskCost],
    links: dict[str, Link],
    lanes: Cores,
    kernel: Kernel | None,
) -> Callable[[IterContext], None]:
    if kernel is None:
        return lambda ctx: None
    cost = costs[name]
    waits_for = [other for other, its in costs.items() if its.waited_by == name]

    def fn(ctx: IterContext) -> Any:
        for submitter in waits_for:
            links["network"].wait(getattr(ctx, f"begun_by_{submitter}"))
        if cost.resource == "compute":
            with lanes.used():
                kernel(cost.seconds)
        else:
            links[cost.resource].wait(links[cost.resource].begin(cost.seconds))
        if cost.background:
            assert isinstance(cost.background, float | int)
            setattr(ctx, f"begun_by_{name}", links["network"].begin(cost.background))

    return fn
