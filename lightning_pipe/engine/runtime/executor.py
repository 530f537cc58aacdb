"""Execution of single tasks: in their thread, on their stream, after their dependencies; and handling of failures.

A dependency between threads is enforced in two phases. (1) On the CPU, the downstream thread waits for the signal of
the upstream task, which is set after the task's device event was recorded. (2) Then the downstream stream waits for the
event. The order matters because waiting for an event that is not yet recorded returns immediately::

    upstream thread     run task │ record event │ set signal
    downstream thread   wait for signal ························(1) │ stream waits for event (2) │ run task
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipe._compat.torch import is_profiler_enabled
from lightning_pipe.engine.common.errors import TaskError
from lightning_pipe.engine.observe.meter import CallerTimeMeter
from lightning_pipe.engine.observe.ranges import profiler_range
from lightning_pipe.engine.observe.trace import Begun, TraceRecorder
from lightning_pipe.engine.plans.collectives import assign_sequencers, check_collective_order
from lightning_pipe.engine.plans.plan import PipelinePlan
from lightning_pipe.engine.plans.schedule import MAIN
from lightning_pipe.engine.plans.task import IterContext
from lightning_pipe.engine.ranks.current_tasks import current_tasks
from lightning_pipe.engine.runtime.devices import DeviceStreams
from lightning_pipe.engine.runtime.sequencer import SubmissionSequencer, SubmissionTicket
from lightning_pipe.engine.runtime.thread_state import TorchThreadState, get_thread_state, use_thread_state
from lightning_pipe.engine.runtime.worker import Worker, is_worker_thread

_log = logging.getLogger(__name__)

# One task of a period: its stage, the method that runs it for a slot (None: call its function), and its operation. The
# method is not bound: a cycle of references would keep the tasks' weights until the next garbage collection.
Call = tuple[int, Callable[["Executor", "Operation", "Slot"], None] | None, "Operation"]

# State that :meth:`Executor.begin_caller_task` returns for :meth:`Executor.end_caller_task`.
Entered = tuple[AbstractContextManager[Any] | None, Begun | None, float, SubmissionTicket | None]


class Operation:
    """Task of the plan with its schedule and dependencies resolved in advance."""

    __slots__ = (
        *("name", "index", "fn", "stage", "group", "stream"),
        *("sequencer_index", "cpu_waits", "device_waits", "waits", "records_event"),
    )

    def __init__(self, plan: PipelinePlan, name: str, index: int, has_streams: bool, turns: Mapping[str, int]) -> None:
        where = plan.schedule[name]
        self.name = name
        self.index = index
        self.fn = plan.tasks[name].fn
        self.stage = where.stage
        self.group = where.thread_group
        self.stream = where.stream if has_streams else None
        self.sequencer_index = turns.get(name)  # the sequence in which the task submits its collectives
        positions = {task: position for position, task in enumerate(plan.tasks)}
        upstream = [
            ((positions[d.upstream], d.distance), plan.schedule[d.upstream])
            for d in plan.dependencies
            if d.downstream == name
        ]
        # Tasks of main have run before later tasks are submitted, and the queue of a group is in order. So a task only
        # has to wait for tasks of other workers.
        self.cpu_waits = tuple(
            dict.fromkeys(access for access, up in upstream if up.thread_group not in (MAIN, where.thread_group))
        )
        self.device_waits: tuple[tuple[int, int], ...] = ()
        self.records_event = False
        if has_streams:
            self.device_waits = tuple(dict.fromkeys(access for access, up in upstream if up.stream != where.stream))
            # retire() also waits for tasks on named streams.
            self.records_event = where.stream is not None or any(
                d.upstream == name and plan.schedule[d.downstream].stream is not None for d in plan.dependencies
            )
        self.waits = bool(self.cpu_waits or self.device_waits or self.sequencer_index is not None)


def build_operations(plan: PipelinePlan, has_streams: bool) -> list[Operation]:
    """Operations of the plan's tasks, in serial order."""
    tasks = plan.tasks.values()
    check_collective_order(plan.name, tasks, plan.schedule, has_streams=has_streams)
    turns = assign_sequencers(tasks, plan.schedule, has_streams=has_streams)
    return [Operation(plan, name, index, has_streams, turns) for index, name in enumerate(plan.tasks)]


class Slot:
    """Iteration in flight: its context, and the signals and device events of its tasks. Later iterations reuse it."""

    __slots__ = ("ctx", "done", "events", "iteration", "lost")

    def __init__(self, operations: list[Operation], streams: DeviceStreams) -> None:
        self.iteration = -1
        self.ctx: IterContext | None = None
        self.done = {op.index: threading.Event() for op in operations if op.group != MAIN}
        self.events = {op.index: streams.make_event() for op in operations if op.records_event}
        self.lost: set[int] = set()  # tasks on workers that failed or were skipped
        for signal in self.done.values():
            signal.set()

    def join(self) -> None:
        """Wait until all tasks of this iteration that were submitted to workers have ended."""
        for signal in self.done.values():
            signal.wait()


class Executor:
    """Runs tasks in the threads and on the streams that the plan gives them.

    The plan is compiled into the calls of a period. A task of the main thread without waits, stream, event or turn is
    called directly. While a trace, a meter or a profiler is on, every task of the main thread is observed instead.

    Attributes:
        calls: tasks in the order of the plan.
        serial_calls: tasks in serial order, each in the calling thread, for an iteration that runs alone.
        trace: records every task (default None). Call :meth:`compile` after a change.
        meter: adds up the calling thread's time (default None). Call :meth:`compile` after a change.
        failure: first failure of a task.
    """

    def __init__(self, plan: PipelinePlan, device: torch.device) -> None:
        self.streams = DeviceStreams(device, plan.streams)
        self.operations = build_operations(plan, self.streams.available)
        by_name = {op.name: op for op in self.operations}
        self._ordered = [by_name[name] for name in plan.order]
        # A task may wait for an iteration that is already trained, whose slot must not have been reused by then.
        longest = max((d.distance for d in plan.dependencies), default=0)
        self._slots = [Slot(self.operations, self.streams) for _ in range(plan.pipeline_depth + longest)]
        self._workers = {name: Worker(name) for name in plan.thread_group_names if name != MAIN}
        self._sequencers = [SubmissionSequencer() for _ in {op.sequencer_index for op in self.operations} - {None}]
        self._base = 0
        self.trace: TraceRecorder | None = None
        self.meter: CallerTimeMeter | None = None
        self._profiled = False
        self.failure: TaskError | None = None
        self._broken: set[str | int] = set()  # thread groups and sequences of turns in which a task failed
        self.calls: list[Call] = []
        self.serial_calls: list[Call] = []
        self.compile()

    # ------------------------------------------------------------------ compilation

    def update_profiler_ranges(self) -> None:
        """Compile the tasks with profiler ranges if a profiler has started, and without them if it has ended."""
        # Checked for the whole process: PyTorch's own check is per thread and returns False in workers.
        profiled = is_profiler_enabled()
        if profiled != self._profiled:
            self._profiled = profiled
            self.compile()

    def compile(self) -> None:
        """Decide how each task runs. An open period continues with the new calls."""
        self._observed = self._profiled or self.trace is not None or self.meter is not None
        self.calls[:] = [(op.stage, self._choose_run_method(op), op) for op in self._ordered]
        self.serial_calls[:] = [
            (0, Executor._run_serial_task if self._observed or op.records_event else None, op) for op in self.operations
        ]

    def _choose_run_method(self, op: Operation) -> Callable[[Executor, Operation, Slot], None] | None:
        if op.group != MAIN:
            return Executor._submit
        bare = not op.waits and not op.records_event and op.stream is None and not self._observed
        return None if bare else Executor._run_here

    # ------------------------------------------------------------------ iterations

    def restart_at_iteration(self, base: int) -> None:
        """Restart at iteration *base* while none is in flight: later tasks do not wait for earlier iterations."""
        self._base = base
        self.streams.fence()

    def assign_slot(self, ctx: IterContext) -> Slot:
        """Assign a slot to the iteration of *ctx*."""
        slot = self._get_slot_of_iteration(ctx.iter_idx)
        slot.iteration = ctx.iter_idx
        slot.lost.clear()
        slot.ctx = ctx
        return slot

    def retire(self, slot: Slot) -> IterContext:
        """Wait until the iteration of *slot* is done, and make the current stream wait for all of its work."""
        if slot.done:
            begun = time.perf_counter()
            slot.join()
            if self.meter is not None:
                self.meter.add_wait_time(begun)
        if self.failure is not None:
            raise self.failure
        if self.streams.available:
            for op in self.operations:
                if op.stream is not None:
                    self.streams.wait_event(slot.events[op.index])
        assert slot.ctx is not None
        ctx, slot.ctx = slot.ctx, None
        return ctx

    # ------------------------------------------------------------------ tasks

    def begin_caller_task(self, op: Operation, slot: Slot) -> Entered:
        """Wait for the dependencies and the turn of *op*, whose work the caller does."""
        ticket = None
        if op.waits:
            ticket = self._issue_submission_ticket(op)
            try:
                self._wait_here(op, slot)
                if ticket is not None:
                    ticket.begin()
                self.raise_failure()
            except BaseException:
                if ticket is not None:
                    ticket.end()
                raise
        current_tasks[MAIN] = op.name, slot.iteration, False
        if not self._observed:
            return None, None, 0.0, ticket
        shown = profiler_range(op.name, self.trace is not None)
        shown.__enter__()
        return shown, self.trace.begin_span() if self.trace else None, time.perf_counter(), ticket

    def end_caller_task(self, op: Operation, slot: Slot, entered: Entered) -> None:
        """End a task after :meth:`begin_caller_task`."""
        shown, begun, metered, ticket = entered
        current_tasks[MAIN] = op.name, slot.iteration, True
        if ticket is not None:
            ticket.end()
        if op.records_event:
            self.streams.record(slot.events[op.index])
        if self.trace and begun:
            self.trace.end_span(op.name, slot.iteration, MAIN, None, begun)
        if self.meter is not None and metered:
            self.meter.add_task_time(op.name, metered)
        if shown is not None:
            shown.__exit__(None, None, None)

    def abandon_caller_task(self, entered: Entered) -> None:
        """Pass on the turn of a task that will not be ended."""
        ticket = entered[-1]
        if ticket is not None:
            ticket.end()

    def wait_for(self, op: Operation, slot: Slot) -> None:
        """Wait in the calling thread until *op* has run for the iteration of *slot*, and on its stream for its work."""
        begun = time.perf_counter()
        if op.group != MAIN:
            slot.done[op.index].wait()
        if self.meter is not None:
            self.meter.add_wait_time(begun)
        self.raise_failure()
        if op.stream is not None:
            self.streams.wait_event(slot.events[op.index])

    def _run_serial_task(self, op: Operation, slot: Slot) -> None:
        """Run a task of an iteration that runs alone, and record its event."""
        begun = time.perf_counter()
        self._call(op, slot, MAIN, None)
        if self.meter is not None:
            self.meter.add_task_time(op.name, begun)

    def _run_here(self, op: Operation, slot: Slot) -> None:
        """Run a task of the main thread after its waits, in its turn and on its stream."""
        ticket = self._issue_submission_ticket(op)
        try:
            if op.cpu_waits or op.device_waits:
                self._wait_here(op, slot)
                self.raise_failure()
            begun = time.perf_counter()
            try:
                if ticket is not None:
                    ticket.begin()
                    self.raise_failure()
                self._call(op, slot, MAIN, op.stream)
            except BaseException:
                if op.sequencer_index is not None:
                    self._broken.add(op.sequencer_index)
                raise
            if self.meter is not None:
                self.meter.add_task_time(op.name, begun)
        finally:
            if ticket is not None:
                ticket.end()

    def _submit(self, op: Operation, slot: Slot) -> None:
        """Submit a task to its worker."""
        ticket = self._issue_submission_ticket(op)
        try:
            slot.done[op.index].clear()
            submitted = time.perf_counter() if self.trace else None
            work = partial(
                self._run_task_on_worker, op, slot, get_thread_state(), self.streams.current(), ticket, submitted
            )
            self._workers[op.group].submit(work)
        except BaseException as error:
            if ticket is not None:
                ticket.end()
            self.record_failure(error, op.name, slot.iteration, op.stage)
            # Set after the failure is recorded, so that waiting tasks see it.
            slot.done[op.index].set()
            raise

    def _run_task_on_worker(
        self,
        op: Operation,
        slot: Slot,
        state: TorchThreadState,
        stream: Any,
        ticket: SubmissionTicket | None,
        submitted: float | None,
    ) -> None:
        """Run a task in its worker. In all cases the signal is set and the turn is passed on at the end.

        After a failure in another thread the tasks that were submitted before it still run, unless they depend on it:
        other ranks have submitted their collectives too, and wait for them.
        """
        try:
            with use_thread_state(state), self.streams.use_stream(stream):
                self._wait(op, slot)
                if ticket is not None:
                    ticket.begin()
                if self._depends_on_failure(op, slot):
                    slot.lost.add(op.index)
                else:
                    self._call(op, slot, op.group, op.stream, submitted)
        except BaseException as error:
            slot.lost.add(op.index)
            self._broken.add(op.group)
            if op.sequencer_index is not None:
                self._broken.add(op.sequencer_index)
            self.record_failure(error, op.name, slot.iteration, op.stage)
        finally:
            if ticket is not None:
                ticket.end()
            # This thread no longer refers to the context, which can be freed after all signals are set.
            slot.done[op.index].set()

    def _call(self, op: Operation, slot: Slot, group: str, stream: str | None, submitted: float | None = None) -> None:
        trace = self.trace
        with profiler_range(op.name, trace is not None), self.streams.use_named_stream(stream):
            begun = trace.begin_span() if trace else None
            current_tasks[group] = op.name, slot.iteration, False
            op.fn(slot.ctx)
            current_tasks[group] = op.name, slot.iteration, True
            if op.records_event:
                self.streams.record(slot.events[op.index])
            if trace and begun:
                trace.end_span(op.name, slot.iteration, group, stream, begun, submitted)

    # ------------------------------------------------------------------ waits

    def _issue_submission_ticket(self, op: Operation) -> SubmissionTicket | None:
        return None if op.sequencer_index is None else self._sequencers[op.sequencer_index].issue_ticket()

    def _wait(self, op: Operation, slot: Slot) -> None:
        for upstream, distance in op.cpu_waits:
            if slot.iteration - distance >= self._base:
                self._get_slot_of_iteration(slot.iteration - distance).done[upstream].wait()
        if op.device_waits:
            with self.streams.use_named_stream(op.stream):
                for upstream, distance in op.device_waits:
                    if slot.iteration - distance >= self._base:
                        self.streams.wait_event(self._get_slot_of_iteration(slot.iteration - distance).events[upstream])

    def _wait_here(self, op: Operation, slot: Slot) -> None:
        """Wait in the calling thread, and add the time to the meter if there is one."""
        begun = time.perf_counter()
        self._wait(op, slot)
        if self.meter is not None:
            self.meter.add_wait_time(begun)

    def _get_slot_of_iteration(self, iteration: int) -> Slot:
        return self._slots[iteration % len(self._slots)]

    # ------------------------------------------------------------------ failures and end

    def record_failure(self, error: BaseException, task: str, iteration: int, stage: int) -> BaseException:
        """Record that *task* failed. Only the first failure is kept."""
        if self.failure is None:
            failure = TaskError(task, iteration, stage, dist.get_rank() if dist.is_initialized() else 0, error)
            failure.__cause__ = error
            failure.on_worker = is_worker_thread()
            self.failure = failure
        return self.failure if isinstance(error, Exception) else error

    def raise_failure(self) -> None:
        """Raise the recorded failure, if there is one."""
        if self.failure is not None:
            raise self.failure

    def _depends_on_failure(self, op: Operation, slot: Slot) -> bool:
        """Return True if a task failed that *op* depends on, that its thread ran, or that had its turn before it."""
        if not self._broken.isdisjoint((op.group, op.sequencer_index)):
            return True
        reads = (
            (self._get_slot_of_iteration(slot.iteration - distance), upstream) for upstream, distance in op.cpu_waits
        )
        return any(upstream in upstream_slot.lost for upstream_slot, upstream in reads)

    def wait_for_workers(self) -> None:
        """Wait for the workers to finish all submitted tasks: after an interrupt, signals of slots are not reliable."""
        for worker in self._workers.values():
            worker.wait_until_idle()

    def close(self) -> None:
        """End the workers after they have finished all submitted tasks. Can be called again after an interrupt."""
        for group, worker in self._workers.items():
            if not worker.close():
                _log.warning(
                    "the thread of group %r did not end in time and is left running. It is stuck in a call, for"
                    " example in a collective with a failed rank; look for the first error on the other ranks",
                    group,
                )
        for slot in self._slots:
            slot.ctx = None
