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

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.observe.device_clock import DeviceClock
from lightning_pipe.engine.observe.meter import CallerTimeMeter
from lightning_pipe.engine.observe.trace import TaskSpan, TraceRecorder
from lightning_pipe.engine.plans.plan import PipelinePlan
from lightning_pipe.engine.plans.schedule import MAIN
from lightning_pipe.engine.plans.task import IterContext, PipelineTask
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.ranks.current_tasks import current_tasks
from lightning_pipe.engine.runtime.executor import Call, Entered, Executor, Operation, Slot
from lightning_pipe.engine.runtime.replay import Key, Shortcut

K = TypeVar("K")
V = TypeVar("V")
P = ParamSpec("P")
T = TypeVar("T")


def end_pipeline_on_interrupt(
    method: Callable[Concatenate[SWPipeline, P], T],
) -> Callable[Concatenate[SWPipeline, P], T]:
    """Let an interrupt end the pipeline: between any two lines, it may leave the state inconsistent.

    ``begin_period``, ``run_until`` and ``finish_period``, which every batch calls, do the same by themselves.
    """

    @functools.wraps(method)
    def guarded(self: SWPipeline, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._record_interrupt(error)
            raise

    return guarded


class SWPipeline:
    """Software pipeline that runs a plan over the batches of an iterator. One :meth:`progress` call trains one batch.

    A task that raises ends the pipeline: the call that runs its period and every later call raise the
    :class:`TaskError`. An interrupt in a task, or while the pipeline changes its state, also ends the pipeline and is
    raised unchanged. :meth:`close` always works.

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
        self.plan = plan
        self._group = group
        self._device = torch.device("cpu" if device is None else device)
        self._executor = Executor(plan, self._device)
        self._positions = {name: position for position, name in enumerate(plan.order)}
        self._serial_positions = {name: position for position, name in enumerate(plan.tasks)}

        self._in_flight: dict[int, Slot] = {}
        self._fetched = 0  # iterations started, over the life of the pipeline
        self._source: Iterator[Any] | None = None
        self._exhausted = False
        self._agreed = False
        self._closed = False

        self._open = False  # True while a period is open
        self._trained = 0  # iteration that the open period trains
        self._serial = False  # True if that iteration runs alone, in serial order
        self._calls: list[Call] = self._executor.calls  # the tasks of the open period
        self._cursor = 0  # index of the next task of the open period
        self._begun: tuple[Operation, Entered] | None = None  # task that the caller is running

    # ------------------------------------------------------------------ whole periods

    @property
    def is_empty(self) -> bool:
        """True if no iteration is in flight."""
        return not self._in_flight

    @property
    def in_flight(self) -> tuple[IterContext, ...]:
        """Contexts of iterations that have started and not retired, oldest first; at most the plan's depth."""
        return tuple(slot.ctx for slot in self._in_flight.values() if slot.ctx is not None)

    @property
    def device(self) -> torch.device:
        """Device of the plan's streams."""
        return self._device

    @property
    def num_started(self) -> int:
        """Number of iterations started so far, which is the index of the next one."""
        return self._fetched

    @property
    def failed(self) -> bool:
        """True if a task has raised, which ends the pipeline."""
        return self._executor.failure is not None

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
        self.begin_period(data_iter)
        return self.finish_period()

    def drain(self) -> list[IterContext]:
        """Train all batches in flight without fetching new ones; returns their contexts in order."""
        nothing: Iterator[Any] = iter(())
        retired = []
        while self._in_flight:
            retired.append(self.progress(nothing))
        return retired

    @end_pipeline_on_interrupt
    def abandon(self) -> int:
        """Abandon all batches in flight without training them, after the workers have finished their submitted tasks.

        Returns:
            The number of abandoned batches, including the batch of an open period.
        """
        self._abandon_caller_task()
        self.wait_for_workers()
        for slot in self._in_flight.values():
            slot.ctx = None
        abandoned = len(self._in_flight)
        self._in_flight.clear()
        self._open = False
        return abandoned

    def wait_for_workers(self) -> None:
        """Wait until the workers have finished all submitted tasks."""
        if self._in_flight:
            self._executor.wait_for_workers()

    @end_pipeline_on_interrupt
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
        self._restart_at_next_iteration()
        if not self._agreed:
            self._check_plan_agreement()
        self._start_iteration(batch)
        self._open_period(serial=True)
        return self.finish_period()

    # ------------------------------------------------------------------ a period in steps, for a caller with hooks

    @end_pipeline_on_interrupt
    def fill_pipeline(self, data_iter: Iterator[Any]) -> None:
        """Start the iterations that run ahead, so that the next period can train the oldest one.

        Does nothing if iterations are in flight.
        """
        self._check_usable()
        if not self._in_flight:
            self._fill(data_iter)

    def begin_period(self, data_iter: Iterator[Any]) -> IterContext:
        """Open the next period: fill the pipeline if it is empty, and start one new iteration."""
        try:
            self._check_usable()
            if not self._in_flight:
                self._fill(data_iter)
            # After the end of the data there is a gap; an iteration started after it would miss its first stages.
            if self._fetched - self._trained == self.plan.max_stage:
                self._fetch(data_iter)
            if not self._in_flight:
                raise StopIteration
            return self._open_period(serial=False)
        except BaseException as error:
            self._record_interrupt(error)
            raise

    @end_pipeline_on_interrupt
    def begin_serial_period(self, data_iter: Iterator[Any]) -> IterContext:
        """Open a period that runs one new iteration alone: all tasks in serial order in the calling thread."""
        self._check_usable()
        self._check_empty()
        self._restart_at_next_iteration()
        if not self._fetch(data_iter):
            raise StopIteration
        return self._open_period(serial=True)

    def run_until(self, task: str) -> None:
        """Run the tasks of the open period in order, up to and including *task*.

        Does nothing if *task* has already run.
        """
        self._check_period_open()
        end = self._position(task) + 1
        executor, calls, in_flight = self._executor, self._calls, self._in_flight
        op: Operation | None = None
        slot: Slot | None = None
        try:
            while self._cursor < end:
                stage, run, op = calls[self._cursor]
                self._cursor += 1
                # While the pipeline drains, later iterations do not exist.
                if (slot := in_flight.get(self._trained + stage)) is None:
                    continue
                if executor.failure is not None:
                    raise executor.failure
                if run is None:
                    current_tasks[MAIN] = op.name, slot.iteration, False
                    op.fn(slot.ctx)
                    current_tasks[MAIN] = op.name, slot.iteration, True
                else:
                    run(executor, op, slot)
        except BaseException as error:
            where = ("between tasks", self._trained, 0)
            if op is not None and slot is not None:
                where = (op.name, slot.iteration, op.stage)
            failure = executor.record_failure(error, *where)
            raise failure from failure.__cause__

    @end_pipeline_on_interrupt
    def wait_for(self, task: str) -> None:
        """Wait until a task that ran ahead has run for the batch of the open period, in whatever thread it runs.

        The current stream waits for the task's work on its stream.
        """
        self._check_period_open()
        position = self._position(task)
        op = self._calls[position][-1]
        if self._cursor <= position and (self._serial or not op.stage):
            raise PlanError(
                f"task {task!r} of iteration {self._trained} has not been submitted yet; call run_until({task!r}) first"
            )
        if not self._serial:
            self._executor.wait_for(op, self._in_flight[self._trained])

    @end_pipeline_on_interrupt
    def begin_caller_task(self, task: str) -> IterContext:
        """Run all tasks before *task* and wait for its dependencies, so that the caller can do its work.

        For work that the caller must do between its own hooks, such as an optimizer step inside Lightning. Call
        :meth:`end_caller_task` afterwards. Only tasks of stage 0 in the group "main" and on the current stream can be
        run in this way. A globally ordered task holds its turn until then.
        """
        self._check_period_open()
        target = self._position(task)
        op = self._calls[target][-1]
        if isinstance(op.fn, Shortcut):
            raise PlanError(f"task {task!r} is replayed and cannot be begun; call disable_shortcut({task!r}) first")
        where = self.plan.schedule[task]
        if where.stage != 0 or where.thread_group != MAIN or where.stream is not None:
            raise PlanError(
                f"task {task!r} is scheduled as {where}; only a task of stage 0 in group {MAIN!r}, without a named"
                " stream, can be run by the caller"
            )
        if self._cursor > target:
            raise PlanError(
                f"task {task!r} of iteration {self._trained} has run already; call begin_caller_task() earlier"
                " in the period"
            )
        if target:
            self.run_until(self._calls[target - 1][-1].name)
        slot = self._in_flight[self._trained]
        self._begun = (op, self._executor.begin_caller_task(op, slot))
        assert slot.ctx is not None
        return slot.ctx

    @end_pipeline_on_interrupt
    def end_caller_task(self, task: str) -> None:
        """End a task that :meth:`begin_caller_task` began."""
        if self._begun is None or self._begun[0].name != task:
            raise PlanError(f"task {task!r} was not begun; call begin_caller_task({task!r}) first")
        op, entered = self._begun
        self._begun = None
        self._cursor += 1
        self._executor.end_caller_task(op, self._in_flight[self._trained], entered)

    def finish_period(self) -> IterContext:
        """Run the remaining tasks of the open period and retire the iteration that it trained."""
        self.run_until(self._calls[-1][-1].name)
        try:
            ctx = self._executor.retire(self._in_flight[self._trained])
            del self._in_flight[self._trained]
            self._trained += 1
            self._open = False
            return ctx
        except BaseException as error:
            self._record_interrupt(error)
            raise

    # ------------------------------------------------------------------ shortcuts

    @property
    def shortcut_tasks(self) -> tuple[str, ...]:
        """Names of the replayed tasks."""
        return tuple(op.name for op in self._executor.operations if isinstance(op.fn, Shortcut))

    def enable_shortcut(self, *tasks: str | PipelineTask, key: Key | None = None, replay_first: bool = False) -> None:
        """Replay tasks: each runs once more per *key*, its effects are captured, and later runs restore them instead.

        Every rank calls this at the same point, between periods.

        Args:
            tasks: names or tasks of the plan.
            key: function that maps a context to a key. Iterations with the same key must have the same values upstream
                of the tasks (default None: all iterations have the same values, as when one batch is repeated).
            replay_first: make captured iterations equal to replayed ones, see
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
        for op in self._executor.operations:
            if op.name in names:
                op.fn = Shortcut(self.plan.tasks[op.name], key, replay_first=replay_first)

    def disable_shortcut(self, *tasks: str | PipelineTask) -> None:
        """Run tasks again instead of replaying them, and discard their captured effects.

        Every rank calls this at the same point, between periods.

        Args:
            tasks: names or tasks of the plan (default all).

        Raises:
            PlanError: a task is unknown, a period is open, or ranks name different tasks.
        """
        names = self._agreed_names("tasks to run again", tasks)
        for op in self._executor.operations:
            if not names or op.name in names:
                op.fn = self.plan.tasks[op.name].fn

    @contextmanager
    def reading_contexts_after_tasks(
        self, tasks: Iterable[str], read: Callable[[str, IterContext], Mapping[K, V]]
    ) -> Iterator[dict[K, V]]:
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
        watched = [(op, op.fn) for op in self._executor.operations if op.name in names]
        try:
            for op, fn in watched:
                op.fn = _wrap_to_read_context_after_run(fn, partial(read, op.name), entries)
            yield entries
        finally:
            for op, fn in watched:
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
            if name not in self.plan.tasks:
                self._raise_unknown_task_error(name)
        # Submitted tasks finish with their current functions, so that all ranks change functions at the same point.
        self.wait_for_workers()
        return names

    # ------------------------------------------------------------------ trace and end

    @property
    def meter(self) -> CallerTimeMeter | None:
        """Meter of the calling thread's time (default None)."""
        return self._executor.meter

    @meter.setter
    def meter(self, meter: CallerTimeMeter | None) -> None:
        self._executor.meter = meter
        self._executor.compile()

    @property
    def trace(self) -> TraceRecorder | None:
        """Trace that is being recorded; None if recording is off."""
        return self._executor.trace

    def start_trace(self, max_spans: int | None = None) -> None:
        """Start to record a :class:`TaskSpan` for every task.

        Args:
            max_spans: number of latest spans to keep (default None, all).
        """
        has_streams = self._executor.streams.available
        self._executor.trace = TraceRecorder(max_spans, DeviceClock(self._device) if has_streams else None)
        self._executor.compile()

    def stop_trace(self) -> list[TaskSpan]:
        """Stop recording; returns the ended spans in the order of their ends. Open spans are dropped."""
        trace, self._executor.trace = self._executor.trace, None
        self._executor.compile()
        return trace.spans() if trace else []

    def close(self) -> None:
        """Abandon all batches in flight and end the worker threads. Can be called repeatedly and after a failure."""
        self._closed = True
        self._abandon_caller_task()
        self._executor.close()
        self._in_flight.clear()
        self._source = None

    def __enter__(self) -> SWPipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ state between two calls

    def _fill(self, data_iter: Iterator[Any]) -> None:
        self._restart_at_next_iteration()
        self._serial, self._calls = False, self._executor.calls
        trained = self._trained
        try:
            for period in range(trained - self.plan.max_stage, trained):
                self._trained = period
                if not self._fetch(data_iter) and not self._in_flight:
                    raise StopIteration
                self._cursor, self._open = 0, True
                self.run_until(self._calls[-1][-1].name)
        finally:
            self._trained, self._open = trained, False

    def _restart_at_next_iteration(self) -> None:
        self._trained = self._fetched
        self._executor.restart_at_iteration(self._trained)

    def _check_plan_agreement(self) -> None:
        # Before the first fetch, because a rank without data must also take part in the comparison.
        check_agreement(self.plan.description(), "plan", self._group)
        self._agreed = True

    def _fetch(self, data_iter: Iterator[Any]) -> bool:
        if not self._agreed:
            self._check_plan_agreement()
        if data_iter is not self._source:
            self._source, self._exhausted = data_iter, False
        if self._exhausted:
            return False
        begun = time.perf_counter()
        try:
            batch = next(data_iter)
        except StopIteration:
            self._exhausted = True
            return False
        except BaseException as error:
            failure = self._executor.record_failure(error, "data iterator", self._fetched, self.plan.max_stage)
            raise failure from failure.__cause__
        if self._executor.meter is not None:
            self._executor.meter.add_fetch_time(begun)
        self._start_iteration(batch)
        return True

    def _start_iteration(self, batch: Any) -> None:
        self._in_flight[self._fetched] = self._executor.assign_slot(self.plan.context(batch, self._fetched))
        self._fetched += 1

    def _open_period(self, serial: bool) -> IterContext:
        self._executor.update_profiler_ranges()
        self._calls = self._executor.serial_calls if serial else self._executor.calls
        self._serial, self._cursor, self._open = serial, 0, True
        ctx = self._in_flight[self._trained].ctx
        assert ctx is not None
        return ctx

    def _position(self, task: str) -> int:
        positions = self._serial_positions if self._serial else self._positions
        if task not in positions:
            self._raise_unknown_task_error(task)
        return positions[task]

    def _raise_unknown_task_error(self, task: str) -> NoReturn:
        raise PlanError(f"the plan has no task {task!r}; its tasks are {', '.join(self.plan.tasks)}")

    def _check_usable(self) -> None:
        """Raise an error unless a new period can begin."""
        if self._closed or self._executor.failure is not None:
            self._refuse()
        if self._open:
            raise PlanError(f"the period of iteration {self._trained} is open; call finish_period() or abandon() first")

    def _check_period_open(self) -> None:
        """Raise an error unless the open period can continue."""
        if self._closed or self._executor.failure is not None:
            self._refuse()
        if not self._open:
            raise PlanError("no period is open; call begin_period(data_iter) first")
        if self._begun is not None:
            name = self._begun[0].name
            raise PlanError(
                f"task {name!r} of iteration {self._trained} has begun; call end_caller_task({name!r}) first"
            )

    def _refuse(self) -> None:
        if self._closed:
            raise PlanError(f"pipeline {self.plan.name!r} is closed; build a new one")
        self._executor.raise_failure()

    def _check_empty(self) -> None:
        if self._in_flight:
            raise PlanError(
                f"pipeline {self.plan.name!r} has {len(self._in_flight)} batches in flight, but a serial iteration must"
                " run alone; call drain() first"
            )

    def _record_interrupt(self, error: BaseException) -> None:
        """Record an interrupt as the failure that ends the pipeline."""
        if not isinstance(error, Exception):
            self._executor.record_failure(error, "between tasks", self._trained, 0)

    def _abandon_caller_task(self) -> None:
        """Forget a task that the caller has begun, so that workers do not wait for its turn to end."""
        if self._begun is not None:
            self._executor.abandon_caller_task(self._begun[1])
            self._begun = None


def _wrap_to_read_context_after_run(
    fn: Callable[[IterContext], None], read: Callable[[IterContext], Mapping[K, V]], entries: dict[K, V]
) -> Callable[[IterContext], None]:
    """Task function that reads the context after each run."""

    def run_task_and_read_context(ctx: IterContext) -> None:
        fn(ctx)
        entries.update(read(ctx))

    return run_task_and_read_context
