"""The engine: runs a plan's tasks period by period.

In period *p* iteration *p* is trained: a task of stage *s* runs for iteration *p + s*. The calling thread walks through
the plan's order once a period; it runs the tasks of the group "main" itself and hands the others to their workers::

    period            p-1                     p                       p+1
    H2D     (stage 2) |1| i+1                 |1| i+2                 |1| i+3
    input   (stage 1)     |2| i                   |2| i+1                 |2| i+2
    forward (stage 0)         |3| i-1                 |3| i                   |3| i+1

How one task runs is :mod:`.executor`'s business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.observe.device_clock import DeviceClock
from lightning_pipe.engine.observe.trace import TaskSpan, Trace
from lightning_pipe.engine.plans.plan import PipelinePlan
from lightning_pipe.engine.plans.schedule import MAIN
from lightning_pipe.engine.plans.task import IterContext, PipelineTask
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.runtime.periods import Periods, ends_on_interrupt
from lightning_pipe.engine.runtime.replay import Key, Shortcut
from lightning_pipe.engine.runtime.stand_ins import StandIns

K = TypeVar("K")
V = TypeVar("V")


class SWPipeline(Periods):
    """Runs a plan over the batches of an iterator. One :meth:`progress` call trains one batch.

    Args:
        plan: what to run, when and where.
        device: where the plan's streams live; without one, or on a device that has no streams, stream names mean
            nothing and overlap comes from the plan's worker threads alone.
        group: process group over which ranks compare their plans before the first period; none where there is one rank.

    A task that raises ends the pipeline: the :class:`TaskError` is raised by the call that was running its period, and
    by every later one. An interrupt is raised as it is, and ends the pipeline too. :meth:`close` always works.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(plan, torch.device("cpu" if device is None else device), group)
        self._stand_ins = StandIns(plan.tasks, self._serial_ops)

    # ------------------------------------------------------------------ whole periods

    @property
    def in_flight(self) -> tuple[IterContext, ...]:
        """Contexts of the iterations started and not yet retired, oldest first: never more than the plan's depth."""
        return tuple(slot.ctx for slot in self._in_flight.values() if slot.ctx is not None)

    @property
    def device(self) -> torch.device:
        """Where the plan's streams live."""
        return self._device

    @property
    def started(self) -> int:
        """How many iterations have been started so far: the index of the next one."""
        return self._fetched

    @property
    def failed(self) -> bool:
        """Whether a task has raised, which ends the pipeline."""
        return self._executor.failure is not None

    @ends_on_interrupt
    def fill_pipeline(self, data_iter: Iterator[Any]) -> None:
        """Start the iterations that run ahead, so that the next period can train the oldest; nothing if that is done.

        Raises:
            StopIteration: *data_iter* has no batch.
            TaskError: a task or *data_iter* raised.
        """
        self._check_usable()
        if self._in_flight:
            return
        self._restart()
        for period in range(self._trained - self.plan.max_stage, self._trained):
            if not self._fetch(data_iter) and not self._in_flight:
                raise StopIteration
            for op in self._plan_ops:
                if slot := self._in_flight.get(period + op.stage):
                    self._executor.run(op, slot)

    @ends_on_interrupt
    def progress(self, data_iter: Iterator[Any]) -> IterContext:
        """Train one batch: a whole period, filling the pipeline before if it is empty.

        Args:
            data_iter: gives one batch a period until it ends; what is in flight then drains in the calls that follow.
                Another iterator may follow on from it in any call; after one that has ended, its batches start when
                all others are trained.

        Returns:
            The context of the iteration trained, which is no longer in flight.

        Raises:
            StopIteration: every batch has been trained.
            TaskError: a task or *data_iter* raised.
        """
        self.begin(data_iter)
        return self.finish()

    def drain(self) -> list[IterContext]:
        """Train what is in flight without fetching any more; returns the contexts in order."""
        nothing: Iterator[Any] = iter(())
        retired = []
        while self._in_flight:
            retired.append(self.progress(nothing))
        return retired

    @ends_on_interrupt
    def abandon(self) -> int:
        """Give up what is in flight without training it, once the workers have done what was submitted to them.

        Returns:
            The number of batches given up, the one of an open period included.
        """
        self.settle()
        for slot in self._in_flight.values():
            slot.ctx = None
        given_up = len(self._in_flight)
        self._in_flight.clear()
        self._open = False
        self._begun = None
        return given_up

    def settle(self) -> None:
        """Wait until the workers have done what they were given."""
        if self._in_flight:
            self._executor.settle()

    @ends_on_interrupt
    def run_one_serial_iter(self, batch: Any, idx: int | None = None) -> IterContext:
        """Run all tasks for *batch* one after the other, in serial order, in the calling thread.

        Args:
            batch: what the data iterator would have given.
            idx: the iteration's index, by default the next one; the iterations after it count on from there.

        Raises:
            PlanError: batches are in flight, whose order this would break.
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

    # ------------------------------------------------------------------ periods in steps

    @ends_on_interrupt
    def begin(self, data_iter: Iterator[Any]) -> IterContext:
        """Open the next period: fill the pipeline if it is empty, and start one new iteration.

        Returns:
            The context that this period trains.

        Raises:
            StopIteration: every batch has been trained.
            PlanError: a period is open already.
            TaskError: a task or *data_iter* raised.
        """
        self._check_usable()
        if not self._in_flight:
            self.fill_pipeline(data_iter)
        # Where the data has ended there is a gap, and an iteration that started behind it would miss its first stages.
        if self._fetched - self._trained == self.plan.max_stage:
            self._fetch(data_iter)
        if not self._in_flight:
            raise StopIteration
        return self._begin_period(self._plan_ops, serial=False)

    @ends_on_interrupt
    def begin_serial(self, data_iter: Iterator[Any]) -> IterContext:
        """Open a period that runs one new iteration alone: all tasks in serial order in the calling thread.

        Raises:
            StopIteration: *data_iter* has no batch.
            PlanError: batches are in flight, or a period is open already.
            TaskError: *data_iter* raised.
        """
        self._check_usable()
        self._check_empty()
        self._restart()
        if not self._fetch(data_iter):
            raise StopIteration
        return self._begin_period(self._serial_ops, serial=True)

    @ends_on_interrupt
    def run_until(self, task: str) -> None:
        """Run the open period's tasks, in its order, up to and including *task*; nothing if that has run already.

        Raises:
            PlanError: there is no such task, no period is open, or the caller has begun a task and not ended it.
            TaskError: a task raised.
        """
        self._check_running()
        target = self._position(task)
        while self._cursor <= target:
            self._advance()

    @ends_on_interrupt
    def begin_task(self, task: str) -> IterContext:
        """Run what comes before *task* and wait for what it depends on; the caller then does its work itself.

        The way for a task whose work a caller with hooks of its own does, like an optimiser step inside Lightning.
        Close it with :meth:`end_task`. Only for tasks of stage 0 that the plan gives to the group "main" and to the
        current stream, and that need no place in the global order.

        Raises:
            PlanError: *task* is none of these, has run already, or see :meth:`run_until`.
            TaskError: a task raised.
        """
        self._check_running()
        target = self._position(task)
        if isinstance(self._ops[target].fn, Shortcut):
            raise PlanError(f"task {task!r} is replayed, but the caller does its work; call disable_shortcut({task!r})")
        where = self.plan.schedule[task]
        if where.stage != 0 or where.thread_group != MAIN or where.stream is not None or where.globally_ordered:
            raise PlanError(
                f"task {task!r} is scheduled as {where}; only a task of stage 0, group {MAIN!r}, no stream of its own"
                " and no global order can be run by the caller"
            )
        if self._cursor > target:
            raise PlanError(f"task {task!r} of iteration {self._trained} has run already; begin it before that")
        while self._cursor < target:
            self._advance()
        op, slot = self._ops[target], self._in_flight[self._trained]
        self._begun = (op, self._executor.enter(op, slot))
        assert slot.ctx is not None
        return slot.ctx

    @ends_on_interrupt
    def end_task(self, task: str) -> None:
        """Close what :meth:`begin_task` opened.

        Raises:
            PlanError: it did not.
        """
        if self._begun is None or self._begun[0].name != task:
            raise PlanError(f"task {task!r} was not begun; call begin_task({task!r}) first")
        op, entered = self._begun
        self._begun = None
        self._cursor += 1
        self._executor.leave(op, self._in_flight[self._trained], entered)

    @ends_on_interrupt
    def finish(self) -> IterContext:
        """Run what is left of the open period and retire the iteration it trained.

        Raises:
            PlanError: no period is open, or the caller has begun a task and not ended it.
            TaskError: a task raised.
        """
        self._check_running()
        while self._cursor < len(self._ops):
            self._advance()
        ctx = self._executor.retire(self._in_flight[self._trained])
        del self._in_flight[self._trained]
        self._trained += 1
        self._open = False
        return ctx

    # ------------------------------------------------------------------ shortcuts

    @property
    def shortcuts(self) -> tuple[str, ...]:
        """The tasks that are replayed."""
        return self._stand_ins.replayed

    def enable_shortcut(self, *tasks: str | PipelineTask, key: Key | None = None, rehearse: bool = False) -> None:
        """Replay tasks: each runs once more, for each *key*, and what it did is captured; then it runs no more.

        Every rank calls this at the same point, between periods.

        Args:
            tasks: of the plan.
            key: of an iteration; those with one key must have the same values upstream of the tasks. None where all
                have the same: one batch, again and again.
            rehearse: see :class:`~lightning_pipe.engine.runtime.replay.Shortcut`; to compare iterations with.

        Raises:
            PlanError: there is no such task, it cannot be replayed, a period is open, or other ranks replay others.
        """
        self._stand_ins.replay(self._agreed_names("tasks to shortcut", tasks), key, rehearse)

    def disable_shortcut(self, *tasks: str | PipelineTask) -> None:
        """Run tasks again, all of them if none is named; what was captured is forgotten. Between periods, on all ranks.

        Raises:
            PlanError: there is no such task, a period is open, or other ranks replay others.
        """
        self._stand_ins.run(self._agreed_names("tasks to run again", tasks))

    @contextmanager
    def watched(self, tasks: Iterable[str], read: Callable[[str, IterContext], Mapping[K, V]]) -> Iterator[dict[K, V]]:
        """Read the context behind each run of some tasks, between periods.

        Args:
            tasks: of the plan.
            read: called with the task's name and the context, in the task's thread; returns entries.

        Yields:
            all entries read so far.
        """
        self._check_usable()
        with self._stand_ins.watched(tasks, read) as found:
            yield found

    def check_agreement(self, description: Sequence[tuple[str, str]], what: str) -> None:
        """See that all ranks are about to do the same; every rank calls it.

        Args:
            description: (name, value) entries.
            what: is described, for the message.

        Raises:
            PlanError: ranks differ.
        """
        check_agreement(description, what, self._group)

    def _agreed_names(self, what: str, tasks: Sequence[str | PipelineTask]) -> list[str]:
        self._check_usable()
        names = [task if isinstance(task, str) else task.name for task in tasks]
        # A set that differs would leave ranks waiting in the collectives that others leave out.
        check_agreement([(name, "") for name in sorted(names)], f"list of {what}", self._group)
        # What workers were given still runs as it was meant when it was submitted: on every rank alike.
        self.settle()
        return names

    # ------------------------------------------------------------------ trace and end

    @property
    def trace(self) -> Trace | None:
        """What is being recorded, if anything."""
        return self._executor.trace

    def start_trace(self, keep: int | None = None) -> None:
        """Record a :class:`TaskSpan` for every task from now on; keep the latest *keep*, or all."""
        has_streams = self._executor.streams.available
        self._executor.trace = Trace(keep, DeviceClock(self._device) if has_streams else None)

    def stop_trace(self) -> list[TaskSpan]:
        """Stop recording; returns the spans in the order in which they ended, without those still open."""
        trace, self._executor.trace = self._executor.trace, None
        return trace.spans() if trace else []

    def close(self) -> None:
        """Give up what is in flight and end the worker threads. May be called again, and after a failure."""
        self._closed = True
        self._executor.close()
        self._in_flight.clear()
        self._source = None

    def __enter__(self) -> SWPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
