"""Pipeline engine: runs the tasks of a plan period by period.

Period *p* trains iteration *p*: a task of stage *s* runs for iteration *p + s*. Once per period the calling thread
steps through the plan's order. It runs tasks of the group "main" and submits the others to their workers::

    period            p-1                     p                       p+1
    H2D     (stage 2) |1| i+1                 |1| i+2                 |1| i+3
    input   (stage 1)     |2| i                   |2| i+1                 |2| i+2
    forward (stage 0)         |3| i-1                 |3| i                   |3| i+1

:mod:`.executor` runs a single task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.observe.device_clock import DeviceClock
from lightning_pipe.engine.observe.trace import TaskSpan, Trace
from lightning_pipe.engine.plans.plan import PipelinePlan
from lightning_pipe.engine.plans.task import IterContext, PipelineTask
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.runtime.executor import Operation
from lightning_pipe.engine.runtime.periods import ends_on_interrupt
from lightning_pipe.engine.runtime.replay import Key, Shortcut
from lightning_pipe.engine.runtime.steps import Steps

K = TypeVar("K")
V = TypeVar("V")


class SWPipeline(Steps):
    """Software pipeline that runs a plan over the batches of an iterator. One :meth:`progress` call trains one batch.

    A task that raises ends the pipeline: the call that runs its period and every later call raise the
    :class:`TaskError`. An interrupt also ends the pipeline and is raised unchanged. :meth:`close` always works.

    Args:
        plan: tasks and their schedule.
        device: device of the plan's streams (default the CPU). Without device streams, stream names are ignored and
            only worker threads overlap work.
        group: process group in which ranks compare their plans before the first period (default None, for a single
            rank).
    """

    def __init__(
        self,
        plan: PipelinePlan,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(plan, torch.device("cpu" if device is None else device), group)

    # ------------------------------------------------------------------ whole periods

    @property
    def in_flight(self) -> tuple[IterContext, ...]:
        """Contexts of iterations that have started and not retired, oldest first; at most the plan's depth."""
        return tuple(slot.ctx for slot in self._in_flight.values() if slot.ctx is not None)

    @property
    def device(self) -> torch.device:
        """Device of the plan's streams."""
        return self._device

    @property
    def started(self) -> int:
        """Number of iterations started so far, which is the index of the next one."""
        return self._fetched

    @property
    def failed(self) -> bool:
        """True if a task has raised, which ends the pipeline."""
        return self._executor.failure is not None

    @ends_on_interrupt
    def progress(self, data_iter: Iterator[Any]) -> IterContext:
        """Train one batch by running a whole period. An empty pipeline is filled first.

        Args:
            data_iter: iterator that supplies one batch per period. After its end, later calls drain the batches in
                flight. Any call may pass another iterator. If the previous iterator has ended, batches of the new one
                start after all batches in flight are trained.

        Returns:
            The context of the trained iteration, which is no longer in flight.

        Raises:
            StopIteration: every batch has been trained.
            TaskError: a task or *data_iter* raised.
        """
        self.begin(data_iter)
        return self.finish()

    def drain(self) -> list[IterContext]:
        """Train all batches in flight without fetching new ones; returns their contexts in order."""
        nothing: Iterator[Any] = iter(())
        retired = []
        while self._in_flight:
            retired.append(self.progress(nothing))
        return retired

    @ends_on_interrupt
    def abandon(self) -> int:
        """Abandon all batches in flight without training them, after the workers have finished their submitted tasks.

        Returns:
            The number of abandoned batches, including the batch of an open period.
        """
        self._drop_begun()
        self.settle()
        for slot in self._in_flight.values():
            slot.ctx = None
        abandoned = len(self._in_flight)
        self._in_flight.clear()
        self._open = False
        return abandoned

    def settle(self) -> None:
        """Wait until the workers have finished all submitted tasks."""
        if self._in_flight:
            self._executor.settle()

    @ends_on_interrupt
    def run_one_serial_iter(self, batch: Any, idx: int | None = None) -> IterContext:
        """Run all tasks for *batch* sequentially, in serial order, in the calling thread.

        Args:
            batch: batch in the form in which a data iterator supplies it.
            idx: index of the iteration (default the next index). Later iterations continue from there.

        Raises:
            PlanError: batches are in flight, and a serial iteration would break their order.
            TaskError: a task raised.
        """
        self._check_usable()
        self._check_empty()
        if idx is not None:
            self._fetched = idx
        self._restart()
        self._agree()
        self._start(batch)
        self._begin_period(self._serial_ops, serial=True)
        return self.finish()

    # ------------------------------------------------------------------ shortcuts

    @property
    def shortcuts(self) -> tuple[str, ...]:
        """Names of the replayed tasks."""
        return tuple(op.name for op in self._serial_ops if isinstance(op.fn, Shortcut))

    def enable_shortcut(self, *tasks: str | PipelineTask, key: Key | None = None, rehearse: bool = False) -> None:
        """Replay tasks: each runs once more per *key*, its effects are captured, and later runs restore them instead.

        Every rank calls this at the same point, between periods.

        Args:
            tasks: names or tasks of the plan.
            key: function that maps a context to a key. Iterations with the same key must have the same values upstream
                of the tasks (default None: all iterations have the same values, as when one batch is repeated).
            rehearse: make captured iterations equal to replayed ones, see
                :class:`~lightning_pipe.engine.runtime.replay.Shortcut` (default False).

        Raises:
            PlanError: a task is unknown or cannot be replayed, a period is open, or ranks name different tasks.
        """
        names = self._agreed_names("tasks to shortcut", tasks)
        for name in names:
            if reason := self.plan.tasks[name].not_replayable:
                raise PlanError(
                    f"task {name!r} cannot be replayed, since {reason}; replay other tasks, or measure only its time"
                )
        for op in self._serial_ops:
            if op.name in names:
                op.fn = Shortcut(self.plan.tasks[op.name], key, rehearse=rehearse)

    def disable_shortcut(self, *tasks: str | PipelineTask) -> None:
        """Run tasks again instead of replaying them, and discard their captured effects.

        Every rank calls this at the same point, between periods.

        Args:
            tasks: names or tasks of the plan (default all).

        Raises:
            PlanError: a task is unknown, a period is open, or ranks name different tasks.
        """
        names = self._agreed_names("tasks to run again", tasks)
        for op in self._serial_ops:
            if not names or op.name in names:
                op.fn = self.plan.tasks[op.name].fn

    @contextmanager
    def watched(self, tasks: Iterable[str], read: Callable[[str, IterContext], Mapping[K, V]]) -> Iterator[dict[K, V]]:
        """Read the context after each run of some tasks. Enter and leave between periods.

        Args:
            tasks: names of the watched tasks.
            read: function called with the task's name and the context, in the task's thread. It returns entries.

        Yields:
            A dictionary of all entries read so far.
        """
        self._check_usable()
        entries: dict[K, V] = {}
        names = set(tasks)
        watched = [op for op in self._serial_ops if op.name in names]
        functions = [op.fn for op in watched]

        def run_and_read(op: Operation, fn: Callable[[IterContext], None], ctx: IterContext) -> None:
            fn(ctx)
            entries.update(read(op.name, ctx))

        try:
            for op, fn in zip(watched, functions, strict=True):
                op.fn = partial(run_and_read, op, fn)
            yield entries
        finally:
            for op, fn in zip(watched, functions, strict=True):
                op.fn = fn

    def check_agreement(self, description: Sequence[tuple[str, str]], what: str) -> None:
        """Check that *description* is the same on all ranks. Every rank calls this.

        Args:
            description: (name, value) entries of this rank.
            what: name of the described object in the error message.

        Raises:
            PlanError: ranks differ.
        """
        check_agreement(description, what, self._group)

    def _agreed_names(self, what: str, tasks: Sequence[str | PipelineTask]) -> list[str]:
        self._check_usable()
        names = [task if isinstance(task, str) else task.name for task in tasks]
        # If the sets differed, some ranks would wait in collectives that other ranks do not run.
        check_agreement([(name, "") for name in sorted(names)], f"list of {what}", self._group)
        for name in names:
            self._position(name)
        # Submitted tasks finish with their current functions, so that all ranks change functions at the same point.
        self.settle()
        return names

    # ------------------------------------------------------------------ trace and end

    @property
    def trace(self) -> Trace | None:
        """Trace that is being recorded; None if recording is off."""
        return self._executor.trace

    def start_trace(self, keep: int | None = None) -> None:
        """Start to record a :class:`TaskSpan` for every task.

        Args:
            keep: number of latest spans to keep (default None, all).
        """
        has_streams = self._executor.streams.available
        self._executor.trace = Trace(keep, DeviceClock(self._device) if has_streams else None)

    def stop_trace(self) -> list[TaskSpan]:
        """Stop recording; returns the ended spans in the order of their ends. Open spans are dropped."""
        trace, self._executor.trace = self._executor.trace, None
        return trace.spans() if trace else []

    def close(self) -> None:
        """Abandon all batches in flight and end the worker threads. Can be called repeatedly and after a failure."""
        self._closed = True
        self._drop_begun()
        self._executor.close()
        self._in_flight.clear()
        self._source = None

    def __enter__(self) -> SWPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
