"""Simulated threads and streams of a pipeline.

Each thread or stream is a process that behaves as in :class:`~lightning_pipe.engine.runtime.pipeline.SWPipeline` and
uses the waits of :class:`~lightning_pipe.engine.runtime.executor.Operation`. Only the work of tasks is replaced by its
duration::

    main      fetch │ order: own tasks, others into their worker's queue │ join the oldest iteration │ next period
    worker    take from the queue │ wait for other workers' tasks │ wait for background work │ work │ signal
    stream    take submitted work │ wait for other streams' events │ work │ event (device with streams)
    network   background work, from the end of the task that submits it
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Generator, Hashable, Mapping
from typing import NamedTuple

from lightning_pipe.engine.observe.timeline import BACKGROUND, DEVICE, TASK, Bar
from lightning_pipe.engine.planning.costs import (
    Machine,
    Resource,
    TaskCost,
    list_background_work_waiters,
    split_cost_by_resource,
)
from lightning_pipe.engine.planning.discrete_events import EventLoop, Process, ResourceRequest, SharedResource, Signal
from lightning_pipe.engine.plans.plan import PipelinePlan
from lightning_pipe.engine.plans.schedule import MAIN
from lightning_pipe.engine.runtime.executor import Operation, build_operations

# Relative difference, in units of an iteration's total work, up to which the remaining work of two states is equal.
_RESOLUTION = 1e-9

Body = Generator[Signal | ResourceRequest, None, None]


class _QueueEntry(NamedTuple):
    """Entry for a worker or a stream: a task, or without *op* the request to join all streams and retire."""

    op: Operation | None
    iteration: int
    ticket: int | None = None


class _Queue:
    """Queue of one worker or stream."""

    __slots__ = ("done", "entries", "filled", "per_period")

    def __init__(self, per_period: int) -> None:
        self.entries: deque[_QueueEntry] = deque()
        self.filled = Signal()
        self.done = 0
        self.per_period = per_period


class SimulatedThreads:
    """Simulated run of a plan."""

    def __init__(self, plan: PipelinePlan, costs: Mapping[str, TaskCost], machine: Machine) -> None:
        self.plan = plan
        self.costs = costs
        self.machine = machine
        ops = build_operations(plan, machine.device_streams)
        by_name = {op.name: op for op in ops}
        self.order = [by_name[name] for name in plan.order]
        self.on_workers = [op for op in ops if op.group != MAIN]
        self.on_named_streams = [op for op in ops if op.stream is not None]
        self.waits_for: dict[str, list[str]] = {name: [] for name in plan.tasks}
        for submitter, waiter in list_background_work_waiters(costs):
            self.waits_for[waiter].append(submitter)

        work = [load for cost in costs.values() for load in split_cost_by_resource(cost, machine)]
        # Sorted, because processes whose work ends at the same time continue in the order of resources.
        used = sorted({load.resource for load in work})
        self.resources = {name: SharedResource(name, machine.count_resource_lanes(name)) for name in used}
        self.caller = SharedResource("caller", 1)
        self.clock = EventLoop([*self.resources.values(), self.caller])
        self.signals: dict[Hashable, Signal] = defaultdict(Signal)
        self.queues: dict[Hashable, _Queue] = {}
        for group in plan.thread_group_names:
            if group != MAIN:
                self.queues[group] = _Queue(sum(op.group == group for op in ops))
                self.clock.start_process(Process(group, self._worker(group)))
        if machine.device_streams:
            for name in (None, *plan.streams):
                key = ("stream", name)
                self.queues[key] = _Queue(sum(op.stream == name for op in ops) + (name is None))
                self.clock.start_process(Process(key, self._simulate_stream(key)))
        self.tickets = {op.sequencer_index: itertools.count() for op in ops if op.sequencer_index is not None}

        self.work: list[Bar] = []  # in the order of their ends
        self.retired: list[float] = []  # time of the end of each iteration
        self.states: dict[Hashable, int] = {}
        self.resolution = _RESOLUTION * (sum(load.seconds for load in work) or 1.0)
        self.repeats_after = 0  # iterations after which the state repeats; 0 if no repetition was seen

    def run(self, min_iterations: int, max_iterations: int) -> None:
        """Run until the state repeats, for *min_iterations* to *max_iterations* iterations."""
        self.clock.start_process(Process(MAIN, self._main(min_iterations, max_iterations)))
        self.clock.run()

    # ------------------------------------------------------------------ threads and streams

    def _main(self, at_least: int, at_most: int) -> Body:
        for period in itertools.count(-self.plan.max_stage):
            if self.machine.between_periods:
                yield ResourceRequest(self.caller, self.machine.between_periods)
            for op in self.order:
                iteration = period + op.stage
                if iteration < 0:
                    continue
                entry = _QueueEntry(
                    op, iteration, None if op.sequencer_index is None else next(self.tickets[op.sequencer_index])
                )
                if op.group == MAIN:
                    yield from self._run_task(entry, op)
                else:
                    self._push_queue_entry(op.group, entry)
            if period < 0:
                continue
            for op in self.on_workers:
                yield from self._wait_for_signal("done", op.index, period)
            if self.machine.device_streams:
                self._push_queue_entry(("stream", None), _QueueEntry(None, period))
            else:
                self._record_iteration_end()
            if period + 1 == at_most or (self._reached_steady_state(period) and period + 1 >= at_least):
                return

    def _worker(self, group: str) -> Body:
        queue = self.queues[group]
        while True:
            entry = yield from self._pop_queue_entry(queue)
            assert entry.op is not None
            yield from self._run_task(entry, entry.op)
            self._set_signal("done", entry.op.index, entry.iteration)
            queue.done += 1

    def _run_task(self, entry: _QueueEntry, op: Operation) -> Body:
        """Run a task in its thread. On a device with streams the thread may only submit the work."""
        for upstream, distance in op.cpu_waits:
            if entry.iteration >= distance:
                yield from self._wait_for_signal("done", upstream, entry.iteration - distance)
        if entry.ticket:
            yield from self._wait_for_signal("submitted", op.sequencer_index, entry.ticket - 1)
        cost = self.costs[op.name]
        if not self.machine.runs_on_device(cost):
            yield from self._simulate_task_work(entry, op, TASK, op.group)
        else:
            start = self.clock.now
            if cost.launch:
                yield self._make_resource_request("host", cost.launch)
            self._record_bar(entry, op, TASK, op.group, start)
        if entry.ticket is not None:
            self._set_signal("submitted", op.sequencer_index, entry.ticket)
        if self.machine.device_streams:
            self._push_queue_entry(("stream", op.stream), entry)

    def _simulate_stream(self, name: Hashable) -> Body:
        queue = self.queues[name]
        while True:
            entry = yield from self._pop_queue_entry(queue)
            op = entry.op
            if op is None:
                for stream_op in self.on_named_streams:
                    yield from self._wait_for_signal("event", stream_op.index, entry.iteration)
                self._record_iteration_end()
            else:
                for upstream, distance in op.device_waits:
                    if entry.iteration >= distance:
                        yield from self._wait_for_signal("event", upstream, entry.iteration - distance)
                if self.machine.runs_on_device(self.costs[op.name]):
                    yield from self._simulate_task_work(entry, op, DEVICE, f"stream {op.stream or 'current'}")
                self._set_signal("event", op.index, entry.iteration)
            queue.done += 1

    def _simulate_task_work(self, entry: _QueueEntry, op: Operation, kind: str, lane: str) -> Body:
        """Do the work of one run of a task, in a thread or on a stream."""
        cost = self.costs[op.name]
        start = self.clock.now
        for submitter in self.waits_for[op.name]:
            yield from self._wait_for_signal("background", submitter, entry.iteration)
        if cost.seconds:
            yield self._make_resource_request(cost.resource, cost.seconds)
        waits = bool(cost.background) and cost.waited_by == op.name
        if waits and kind == TASK and entry.ticket is not None:
            self._set_signal(
                "submitted", op.sequencer_index, entry.ticket
            )  # the turn passes to the next task before this wait
        if cost.background:
            self.clock.start_process(Process((op.name, entry.iteration), self._simulate_background_work(entry, op)))
        if waits:
            yield from self._wait_for_signal("background", op.name, entry.iteration)
        self._record_bar(entry, op, kind, lane, start)

    def _simulate_background_work(self, entry: _QueueEntry, op: Operation) -> Body:
        cost, start = self.costs[op.name], self.clock.now
        assert isinstance(cost.background, float | int)
        yield self._make_resource_request(cost.background_resource, cost.background)
        self._record_bar(entry, op, BACKGROUND, cost.background_resource, start)
        self._set_signal("background", op.name, entry.iteration)

    # ------------------------------------------------------------------ signals, queues and resources

    def _make_resource_request(self, resource: Resource, seconds: float) -> ResourceRequest:
        return ResourceRequest(self.resources[resource], seconds)

    def _wait_for_signal(self, *key: Hashable) -> Body:
        signal = self.signals[key]
        if not signal.is_set:
            yield signal

    def _set_signal(self, *key: Hashable) -> None:
        signal = self.signals[key]
        if not signal.is_set:
            self.clock.set_signal(signal)

    def _push_queue_entry(self, queue: Hashable, entry: _QueueEntry) -> None:
        self.queues[queue].entries.append(entry)
        if not self.queues[queue].filled.is_set:
            self.clock.set_signal(self.queues[queue].filled)

    def _pop_queue_entry(self, queue: _Queue) -> Generator[Signal | ResourceRequest, None, _QueueEntry]:
        if not queue.entries:
            queue.filled = Signal()
            yield queue.filled
        return queue.entries.popleft()

    def _record_bar(self, entry: _QueueEntry, op: Operation, kind: str, lane: str, start: float) -> None:
        self.work.append(Bar(0, lane, op.name, kind, start, self.clock.now, entry.iteration))

    def _record_iteration_end(self) -> None:
        self.retired.append(self.clock.now)

    def _reached_steady_state(self, period: int) -> bool:
        """Return True if an earlier period ended in the same state. The simulation repeats from that period on."""
        queues = tuple(queue.done - period * queue.per_period for queue in self.queues.values())
        left = []
        for resource in self.resources.values():
            for process, seconds in resource.list_remaining_work(self.clock.now):
                name = process.name
                if isinstance(name, tuple) and isinstance(name[1], int):  # background work
                    name = (name[0], name[1] - period)
                left.append((repr(name), round(seconds / self.resolution)))
        before = self.states.setdefault((queues, *sorted(left)), period)
        self.repeats_after = period - before
        return before < period
