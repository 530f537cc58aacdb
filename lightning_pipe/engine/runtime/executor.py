"""How one task runs: in its thread, on its stream, after all that it depends on; and what follows when it fails.

A dependency between threads is kept in two phases. (1) On the CPU the downstream thread waits for the signal of the
upstream task, which is set after that task's device event was recorded; (2) then the downstream stream waits for the
event. Waiting for an event that is not yet recorded would return at once, which is why (1) comes first::

    upstream thread     run task │ record event │ set signal
    downstream thread   wait for signal ························(1) │ stream waits for event (2) │ run task
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipe.engine.common.errors import TaskError
from lightning_pipe.engine.observe.meter import Meter
from lightning_pipe.engine.observe.ranges import task_range
from lightning_pipe.engine.observe.trace import Begun, Trace
from lightning_pipe.engine.plans.plan import PipelinePlan
from lightning_pipe.engine.plans.schedule import MAIN
from lightning_pipe.engine.plans.task import IterContext
from lightning_pipe.engine.runtime.devices import DeviceStreams
from lightning_pipe.engine.runtime.sequencer import SubmissionSequencer
from lightning_pipe.engine.runtime.thread_state import ThreadState, capture, entered
from lightning_pipe.engine.runtime.worker import Worker

_log = logging.getLogger(__name__)

# What :meth:`Executor.enter` hands to :meth:`Executor.leave`.
Entered = tuple[AbstractContextManager[Any], Trace | None, Begun | None, float]


class Operation:
    """A task of the plan, with everything looked up that its runs need."""

    __slots__ = ("cpu_waits", "device_waits", "fn", "group", "index", "name", "ordered", "records", "stage", "stream")

    def __init__(self, plan: PipelinePlan, name: str, index: int, has_streams: bool) -> None:
        where = plan.schedule[name]
        self.name = name
        self.index = index
        self.fn = plan.tasks[name].fn
        self.stage = where.stage
        self.group = where.thread_group
        self.stream = where.stream if has_streams else None
        # The order matters only where several threads submit.
        ordered_groups = {s.thread_group for s in plan.schedule.values() if s.globally_ordered}
        self.ordered = where.globally_ordered and len(ordered_groups) > 1
        positions = {task: position for position, task in enumerate(plan.tasks)}
        upstream = [
            ((positions[d.upstream], d.distance), plan.schedule[d.upstream])
            for d in plan.dependencies
            if d.downstream == name
        ]
        # A task of main has run by the time anything after it in the order is submitted, and a group's queue is in
        # order: only what another worker does has to be waited for.
        self.cpu_waits = tuple(
            dict.fromkeys(access for access, up in upstream if up.thread_group not in (MAIN, where.thread_group))
        )
        self.device_waits: tuple[tuple[int, int], ...] = ()
        self.records = False
        if has_streams:
            self.device_waits = tuple(dict.fromkeys(access for access, up in upstream if up.stream != where.stream))
            # The end of an iteration waits for its tasks on named streams too.
            self.records = where.stream is not None or any(
                d.upstream == name and plan.schedule[d.downstream].stream is not None for d in plan.dependencies
            )


class Slot:
    """One iteration in flight: its context, and its tasks' signals and device events, which later iterations re-use."""

    __slots__ = ("ctx", "done", "events", "iteration")

    def __init__(self, operations: list[Operation], streams: DeviceStreams) -> None:
        self.iteration = -1
        self.ctx: IterContext | None = None
        self.done = {op.index: threading.Event() for op in operations if op.group != MAIN}
        self.events = {op.index: streams.event() for op in operations if op.records}
        for signal in self.done.values():
            signal.set()

    def join(self) -> None:
        """Wait until every task submitted to a worker for this iteration has ended."""
        for signal in self.done.values():
            signal.wait()


class Executor:
    """Runs the tasks it is given, each where the plan says.

    Args:
        plan: where each task runs and what it waits for.
        device: where the plan's streams live.
    """

    def __init__(self, plan: PipelinePlan, device: torch.device) -> None:
        self.streams = DeviceStreams(device, plan.streams)
        self.operations = [
            Operation(plan, name, index, self.streams.available) for index, name in enumerate(plan.tasks)
        ]
        # A task may have to wait for an iteration that is trained already, whose slot must then still be its own.
        longest = max((d.distance for d in plan.dependencies), default=0)
        self._slots = [Slot(self.operations, self.streams) for _ in range(plan.pipeline_depth + longest)]
        self._workers = {name: Worker(name) for name in plan.thread_groups if name != MAIN}
        self._sequencer = SubmissionSequencer()
        self._base = 0
        self.trace: Trace | None = None
        self.meter: Meter | None = None
        self.failure: TaskError | None = None

    def restart(self, base: int) -> None:
        """Begin anew with iteration *base*, with none in flight: nothing from here on waits for an earlier iteration.

        What streams still have to do for earlier ones comes before all that they are given from here on.
        """
        self._base = base
        self.streams.join()

    def open(self, ctx: IterContext) -> Slot:
        """A slot for the iteration of *ctx*."""
        slot = self._slot(ctx.iter_idx)
        slot.iteration = ctx.iter_idx
        slot.ctx = ctx
        return slot

    def run(self, op: Operation, slot: Slot, serial: bool = False) -> None:
        """Run *op* for the iteration of *slot*, or hand it to its worker.

        Args:
            op: the task.
            slot: the iteration.
            serial: run it here and now on the current stream, wherever the plan puts it.

        Raises:
            TaskError: it failed, or another task did before.
        """
        self.raise_failure()
        ticket = None
        try:
            if serial:
                self._call_here(op, slot, None, None)
                return
            if op.ordered:
                ticket = self._sequencer.issue()
            if op.group == MAIN:
                if op.cpu_waits or op.device_waits:
                    self._wait_here(op, slot)
                    self.raise_failure()
                self._call_here(op, slot, op.stream, ticket)
            else:
                slot.done[op.index].clear()
                self._workers[op.group].submit(partial(self._work, op, slot, capture(), self.streams.current(), ticket))
                ticket = None  # the worker passes it on
        except BaseException as error:
            failure = self.failed(error, op.name, slot.iteration, op.stage)
            if op.group != MAIN:
                # Only now: what waits for the signal must see that the task has failed.
                slot.done[op.index].set()
            raise failure from failure.__cause__
        finally:
            if ticket is not None:
                self._sequencer.end(ticket)

    def enter(self, op: Operation, slot: Slot) -> Entered:
        """Wait for what *op* depends on, for a caller that does its work; returns what :meth:`leave` needs."""
        self._wait_here(op, slot)
        self.raise_failure()
        trace = self.trace
        shown = task_range(op.name, trace is not None)
        shown.__enter__()
        return shown, trace, trace.begin() if trace else None, time.perf_counter()

    def leave(self, op: Operation, slot: Slot, entered: Entered) -> None:
        """End what :meth:`enter` began."""
        shown, trace, begun, metered = entered
        if op.records:
            self.streams.record(slot.events[op.index])
        if trace and begun:
            trace.end(op.name, slot.iteration, MAIN, None, begun)
        if self.meter is not None:
            self.meter.ran(op.name, metered)
        shown.__exit__(None, None, None)

    def retire(self, slot: Slot) -> IterContext:
        """Wait until the iteration of *slot* is done; the current stream then comes after all of it.

        Raises:
            TaskError: a task failed.
        """
        begun = time.perf_counter()
        slot.join()
        if self.meter is not None:
            self.meter.waited(begun)
        self.raise_failure()
        for op in self.operations:
            if op.stream is not None:
                self.streams.current_waits_for(slot.events[op.index])
        assert slot.ctx is not None
        ctx, slot.ctx = slot.ctx, None
        return ctx

    def failed(self, error: BaseException, task: str, iteration: int, stage: int) -> BaseException:
        """Note that *task* failed, unless something failed before.

        Returns:
            What the calling thread has to raise: an interrupt as it is, for anything else the first failure.
        """
        if self.failure is None:
            failure = TaskError(task, iteration, stage, dist.get_rank() if dist.is_initialized() else 0, error)
            failure.__cause__ = error
            self.failure = failure
        return self.failure if isinstance(error, Exception) else error

    def raise_failure(self) -> None:
        """Raise what failed, if anything did."""
        if self.failure is not None:
            raise self.failure

    def settle(self) -> None:
        """Wait until the workers have done what they were given.

        Signals of slots do not say that after an interrupt, which can come between a hand-off and the note of it.
        """
        for worker in self._workers.values():
            worker.settle()

    def close(self) -> None:
        """End the workers, once they have done what they were given. May be called again after an interrupt."""
        for group, worker in self._workers.items():
            if not worker.close():
                _log.warning("thread group %r is stuck in a call and could not be joined", group)
        for slot in self._slots:
            slot.ctx = None

    def _work(self, op: Operation, slot: Slot, state: ThreadState, stream: Any, ticket: int | None) -> None:
        """One run of a task in its worker. Ends with the signal set and the turn passed on, whatever happens."""
        try:
            # After a failure what is queued is given up, but still signalled: nobody waits for ever.
            if self.failure is None:
                with entered(state), self.streams.using(stream):
                    self._wait(op, slot)
                    if self.failure is None:
                        self._call(op, slot, op.group, op.stream, ticket)
        except BaseException as error:
            self.failed(error, op.name, slot.iteration, op.stage)
        finally:
            if ticket is not None:
                self._sequencer.end(ticket)
            # Nothing in this thread refers to the context any more: once all have signalled it can be freed.
            slot.done[op.index].set()

    def _wait(self, op: Operation, slot: Slot) -> None:
        for upstream, distance in op.cpu_waits:
            if slot.iteration - distance >= self._base:
                self._slot(slot.iteration - distance).done[upstream].wait()
        if op.device_waits:
            with self.streams.named(op.stream):
                for upstream, distance in op.device_waits:
                    if slot.iteration - distance >= self._base:
                        self.streams.current_waits_for(self._slot(slot.iteration - distance).events[upstream])

    def _wait_here(self, op: Operation, slot: Slot) -> None:
        """In the calling thread, whose time may be metered; so is what follows."""
        begun = time.perf_counter()
        self._wait(op, slot)
        if self.meter is not None:
            self.meter.waited(begun)

    def _call_here(self, op: Operation, slot: Slot, stream: str | None, ticket: int | None) -> None:
        begun = time.perf_counter()
        self._call(op, slot, MAIN, stream, ticket)
        if self.meter is not None:
            self.meter.ran(op.name, begun)

    def _call(self, op: Operation, slot: Slot, group: str, stream: str | None, ticket: int | None) -> None:
        if ticket is not None:
            self._sequencer.begin(ticket)
            self.raise_failure()
        trace = self.trace
        with task_range(op.name, trace is not None), self.streams.named(stream):
            begun = trace.begin() if trace else None
            op.fn(slot.ctx)
            if op.records:
                self.streams.record(slot.events[op.index])
            if trace and begun:
                trace.end(op.name, slot.iteration, group, stream, begun)

    def _slot(self, iteration: int) -> Slot:
        return self._slots[iteration % len(self._slots)]
