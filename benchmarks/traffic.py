"""What tasks send to other ranks, and how long they wait for it: recorded while a pipeline runs serially.

A trace says how long a task took. How much of that it waited for other ranks, and for how many bytes, is known here
only: collectives are noted when they are submitted, and when they are waited for::

    EmbInputDistWait │ work ... wait ▒▒▒▒▒▒ work ... submit ┐
    EmbPrefetch                                             │ work ... wait ▒▒▒▒▒▒▒▒ work ...
                                                            └── all-to-all, so many bytes ──┘
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
from lightning_pipe.engine.planning.network import CollectiveKind, Message

__all__ = ["Exchange", "SerialTimes", "TaskRun", "recorded_traffic", "serial_times", "task_runs"]

# Which argument is the buffer of this rank, by name and by place.
_COLLECTIVES: dict[str, tuple[CollectiveKind, str, int]] = {
    "all_to_all_single": ("all_to_all", "input", 1),
    "all_reduce": ("all_reduce", "tensor", 0),
}


@dataclass
class Exchange:
    """One collective. Times are those of ``time.perf_counter``, in seconds.

    Args:
        kind: which.
        bytes: of this rank's buffer.
        submitted: when it was handed to the process group.
        waited: begin and end of the wait for it; None while nobody has waited.
    """

    kind: CollectiveKind
    bytes: int
    submitted: float
    waited: tuple[float, float] | None = None


@contextmanager
def recorded_traffic() -> Iterator[list[Exchange]]:
    """In the body, notes every all-to-all and all-reduce that goes through ``torch.distributed`` in this process.

    Yields:
        What was noted, in the order of the submissions; it grows in the body.
    """
    found: list[Exchange] = []

    def noting(name: str) -> Callable[..., Any]:
        collective = getattr(dist, name)
        kind, argument, position = _COLLECTIVES[name]

        @wraps(collective)
        def noted(*args: Any, **kwargs: Any) -> Any:
            buffer: torch.Tensor = kwargs[argument] if argument in kwargs else args[position]
            exchange = Exchange(kind, buffer.nbytes, time.perf_counter())
            found.append(exchange)
            work = collective(*args, **kwargs)
            if work is None:  # it was waited for inside
                exchange.waited = (exchange.submitted, time.perf_counter())
                return None
            return _NotedWork(work, exchange)

        return noted

    with ExitStack() as replaced:
        for name in _COLLECTIVES:
            replaced.enter_context(mock.patch.object(dist, name, noting(name)))
        yield found


class _NotedWork(dist.Work):
    """A collective under way. TorchRec waits for nothing that is no ``Work``."""

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
        task: its name.
        iteration: of which.
        own: seconds from its begin to its end.
        wait: seconds of these that it waited for other ranks.
        kind: of the largest collective that it submitted; None if it submitted none.
        bytes: of all that it submitted.
    """

    task: str
    iteration: int
    own: float
    wait: float
    kind: CollectiveKind | None
    bytes: int


def task_runs(spans: Iterable[TaskSpan], exchanges: Sequence[Exchange]) -> list[TaskRun]:
    """What each task waited for and sent, of a serial run, in which one task runs at a time."""
    runs = []
    for span in spans:
        sent = [one for one in exchanges if span.start <= one.submitted <= span.end]
        waits = [one.waited for one in exchanges if one.waited and span.start <= one.waited[0] <= span.end]
        largest = max(sent, key=lambda one: one.bytes, default=None)
        runs.append(
            TaskRun(
                span.task,
                span.iteration,
                span.end - span.start,
                sum(end - begin for begin, end in waits),
                None if largest is None else largest.kind,
                sum(one.bytes for one in sent),
            )
        )
    return runs


@dataclass(frozen=True)
class SerialTimes:
    """What tasks take when they run one after the other, by task, in serial order.

    Args:
        own: seconds from begin to end.
        waits: seconds of these for which messages were on their way.
        sent: what each submits.
    """

    own: Mapping[str, float]
    waits: Mapping[str, float]
    sent: Mapping[str, Message]


def serial_times(ranks: Sequence[Sequence[TaskRun]], *, helpers: float = 0.0) -> SerialTimes:
    """One rank's times, of what all ranks have recorded of the same iterations.

    Of a wait only the part counts that all ranks had: who comes last waits for the message alone, the others wait for
    that rank too, and work ahead does not make it faster. So that part stays in *own* as if it were work.

    Args:
        ranks: the runs of each.
        helpers: of an iteration, processor seconds of threads that move messages, where no core is to spare for them.
            So much of the waits is work too, which takes a core from the tasks whenever it is done.

    Raises:
        PlanError: nothing was recorded.
    """
    by_run: dict[tuple[str, int], list[TaskRun]] = {}
    for runs in ranks:
        for run in runs:
            by_run.setdefault((run.task, run.iteration), []).append(run)
    names = list(dict.fromkeys(task for task, _ in by_run))
    if not names:
        raise PlanError("no task was recorded; give the runs of some iterations of the serial plan")
    own, waits, sent = {}, {}, {}
    for name in names:
        every = [runs for (task, _), runs in by_run.items() if task == name]
        own[name] = statistics.median(statistics.fmean(run.own for run in runs) for runs in every)
        waits[name] = statistics.median(min(run.wait for run in runs) for runs in every)
        kind = every[0][0].kind
        if kind is not None:
            sent[name] = Message(kind, statistics.fmean(run.bytes for runs in every for run in runs))
    idle = max(0.0, 1 - helpers / sum(waits.values())) if any(waits.values()) else 1.0
    return SerialTimes(own, {name: idle * wait for name, wait in waits.items()}, sent)
