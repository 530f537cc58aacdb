"""Record of the messages and waits of tasks while a pipeline runs serially.

A trace contains the duration of each task, but not the time that it waited for other ranks, nor the bytes that it sent.
This module records the times at which collectives are submitted and waited for::

    EmbInputDistWait │ work ... wait ▒▒▒▒▒▒ work ... submit ┐
    EmbPrefetch                                             │ work ... wait ▒▒▒▒▒▒▒▒ work ...
                                                            └──── all-to-all, n bytes ──────┘
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lightning_pipe.engine import PlanError, TaskSpan
from lightning_pipe.engine.planning.network import Collective, CollectiveKind

__all__ = ["Exchange", "SerialTimes", "TaskRun", "recorded_traffic", "serial_times", "task_runs"]

# Name and position of the argument that is this rank's buffer, by collective.
_COLLECTIVES: dict[str, tuple[CollectiveKind, str, int]] = {
    "all_to_all_single": ("all_to_all", "input", 1),
    "all_reduce": ("all_reduce", "tensor", 0),
}


@dataclass
class Exchange:
    """One collective. Times are in seconds, from ``time.perf_counter``.

    Args:
        kind: kind of the collective.
        bytes: size of this rank's buffer.
        submitted: time of the submission to the process group.
        waited: start and end of the wait (None before the wait has ended).
    """

    kind: CollectiveKind
    bytes: int
    submitted: float
    waited: tuple[float, float] | None = None


@contextmanager
def recorded_traffic() -> Iterator[list[Exchange]]:
    """Record every all-to-all and all-reduce of ``torch.distributed`` in this process during the body.

    Yields:
        The recorded collectives, in the order of submission. The list grows during the body.
    """
    exchanges: list[Exchange] = []

    def noting(name: str) -> Callable[..., Any]:
        collective = getattr(dist, name)
        kind, argument, position = _COLLECTIVES[name]

        @wraps(collective)
        def noted(*args: Any, **kwargs: Any) -> Any:
            buffer: torch.Tensor = kwargs[argument] if argument in kwargs else args[position]
            exchange = Exchange(kind, buffer.nbytes, time.perf_counter())
            exchanges.append(exchange)
            work = collective(*args, **kwargs)
            if work is None:  # a synchronous call, which waits itself
                exchange.waited = (exchange.submitted, time.perf_counter())
                return None
            return _NotedWork(work, exchange)

        return noted

    with ExitStack() as replaced:
        for name in _COLLECTIVES:
            replaced.enter_context(mock.patch.object(dist, name, noting(name)))
        yield exchanges


class _NotedWork(dist.Work):
    """A collective in flight. Derives from ``Work`` because TorchRec only waits for instances of it."""

    def __init__(self, work: dist.Work, exchange: Exchange) -> None:
        super().__init__()
        self._work = work
        self._exchange = exchange

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        begun = time.perf_counter()
        try:
            return self._work.wait(timeout) if timeout else self._work.wait()
        finally:
            if self._exchange.waited is None:
                self._exchange.waited = (begun, time.perf_counter())

    def is_completed(self) -> bool:
        return self._work.is_completed()


@dataclass(frozen=True)
class TaskRun:
    """One run of a task on one rank.

    Args:
        task: name of the task.
        iteration: iteration of the run.
        seconds: seconds from start to end.
        wait: part of *seconds* in which the task waited for other ranks, in seconds.
        kind: kind of the largest collective that the task submitted, or None without one.
        bytes: total bytes that the task submitted.
    """

    task: str
    iteration: int
    seconds: float
    wait: float
    kind: CollectiveKind | None
    bytes: int


def task_runs(spans: Iterable[TaskSpan], exchanges: Sequence[Exchange]) -> list[TaskRun]:
    """Waits and messages of each task in a serial run, in which one task runs at a time."""
    runs = []
    for span in spans:
        sent = [exchange for exchange in exchanges if span.start <= exchange.submitted <= span.end]
        waits = [
            exchange.waited
            for exchange in exchanges
            if exchange.waited and span.start <= exchange.waited[0] <= span.end
        ]
        largest = max(sent, key=lambda exchange: exchange.bytes, default=None)
        runs.append(
            TaskRun(
                span.task,
                span.iteration,
                span.end - span.start,
                sum(end - begin for begin, end in waits),
                None if largest is None else largest.kind,
                sum(exchange.bytes for exchange in sent),
            )
        )
    return runs


@dataclass(frozen=True)
class SerialTimes:
    """Times and messages of tasks that run one after the other, by task, in serial order.

    Args:
        seconds: seconds from start to end.
        waits: part of *seconds* in which messages were in flight, in seconds.
        sent: message that each task submits.
    """

    seconds: Mapping[str, float]
    waits: Mapping[str, float]
    sent: Mapping[str, Collective]


def serial_times(ranks: Sequence[Sequence[TaskRun]], *, helpers: float = 0.0) -> SerialTimes:
    """Times of one rank, from the records of all ranks for the same iterations.

    Only the part of a wait that all ranks had counts as a wait. The last rank waits for the message alone; the others
    also wait for that rank, which working ahead does not shorten. This additional time stays in *seconds* as if it were
    work.

    Args:
        ranks: task runs of each rank.
        helpers: processor seconds per iteration of the threads that move messages, if they have no spare core (default
            0). This part of the waits is work too, because it takes a core from the tasks.

    Raises:
        PlanError: the record is empty.
    """
    by_run: dict[tuple[str, int], list[TaskRun]] = {}
    for runs in ranks:
        for run in runs:
            by_run.setdefault((run.task, run.iteration), []).append(run)
    names = list(dict.fromkeys(task for task, _ in by_run))
    if not names:
        raise PlanError("no task was recorded; give the runs of some iterations of the serial plan")
    seconds, waits, sent = {}, {}, {}
    for name in names:
        every = [runs for (task, _), runs in by_run.items() if task == name]
        seconds[name] = statistics.median(statistics.fmean(run.seconds for run in runs) for runs in every)
        waits[name] = statistics.median(min(run.wait for run in runs) for runs in every)
        kind = every[0][0].kind
        if kind is not None:
            sent[name] = Collective(kind, statistics.fmean(run.bytes for runs in every for run in runs))
    idle = max(0.0, 1 - helpers / sum(waits.values())) if any(waits.values()) else 1.0
    return SerialTimes(seconds, {name: idle * wait for name, wait in waits.items()}, sent)
