"""Scheduler of mini-batches: the engine runs each partition's micro-batches in one worker thread per partition."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_pipe.engine import IterContext, PipelinePlan, SetupError, SWPipeline, TaskError, TaskSpan
from lightning_pipe.engine.observe.ranges import profiler_range
from lightning_pipe.pipe.cell import Activations, Cell, Gradients
from lightning_pipe.pipe.copies import Copier, PendingCopy
from lightning_pipe.pipe.gradients import GradientSums
from lightning_pipe.pipe.partition import Partition
from lightning_pipe.pipe.plans import (
    build_gpipe_and_1f1b_plans,
    get_input_field_name,
    get_input_gradient_field_name,
    get_skip_tensor_field_name,
    get_skip_tensor_gradient_field_name,
    parse_task_name,
)
from lightning_pipe.pipe.skip import SkipRoute

Result = TypeVar("Result")


@dataclass
class MicroBatch:
    """State of a micro-batch in flight."""

    index: int
    count: int
    cells: Sequence[Cell]  # of each partition
    inputs: Any  # released when the first layer has run
    sums: Sequence[GradientSums]  # of each partition
    output_gradients: list[Tensor | None] | None = None  # None if the last cell computes the loss
    streams: Sequence[Any] = field(default=())  # the caller's current stream on each GPU
    rows: int = 1
    schedulers: tuple[Scheduler, ...] = ()  # that run it: those of pipes whose layers call this pipe come first


# Micro-batch of a traced mini-batch: its index, and for each partition, whether it runs its layers again.
_Traced = tuple[int, list[bool]]


class _CurrentSchedulers(threading.local):
    """Schedulers that the calling thread works for, outermost first."""

    schedulers: tuple[Scheduler, ...] = ()


_current = _CurrentSchedulers()


class _PartitionTaskFunctions:
    """Task functions of a pipe's plans. Without a reference to the scheduler, a forgotten pipe is freed at once."""

    def __init__(self, partitions: Sequence[Partition], routes: Sequence[SkipRoute]) -> None:
        self._partitions = list(partitions)
        self._routes = list(routes)
        self._copier = Copier([partition.device for partition in partitions])

    def forward(self, index: int, ctx: IterContext) -> None:
        micro: MicroBatch = ctx.batch
        with self._enter_partition_device_and_streams(micro, index, "forward"):
            if index == 0:
                value, micro.inputs = micro.inputs, None
            else:
                value = (self._copier.receive(ctx.pop(get_input_field_name(index)), index),)
            skips = {
                route.key: self._copier.receive(ctx.pop(get_skip_tensor_field_name(number)), index)
                for number, route in enumerate(self._routes)
                if route.target == index
            }
            out = micro.cells[index].forward(Activations(value, skips))
            last = index == len(self._partitions) - 1
            sent = PendingCopy(out.value) if last else self._copier.send(out.value, index, index + 1, micro.index)
            setattr(ctx, get_input_field_name(index + 1), sent)
            for number, route in enumerate(self._routes):
                if route.source == index:
                    skipped = self._copier.send(out.skips[route.key], index, route.target, micro.index)
                    setattr(ctx, get_skip_tensor_field_name(number), skipped)

    def recompute(self, index: int, ctx: IterContext) -> None:
        micro: MicroBatch = ctx.batch
        cell = micro.cells[index]
        if cell.checkpointed:
            with self._enter_partition_device_and_streams(micro, index, "recomputation"):
                cell.recompute()

    def backward(self, index: int, ctx: IterContext) -> None:
        micro: MicroBatch = ctx.batch
        # In Pipe.loss, backward runs inside the caller's autocast. A caller of backward() has usually left it.
        inside = micro.output_gradients is None
        with (
            self._enter_partition_device_and_streams(micro, index, "backward"),
            _without_autocast() if inside else nullcontext(),
        ):
            gradients: Gradients = {}
            if index < len(self._partitions) - 1:
                gradients[None] = self._copier.receive(ctx.pop(get_input_gradient_field_name(index + 1)), index)
            elif micro.output_gradients is not None:
                gradients[None] = micro.output_gradients
            for number, route in enumerate(self._routes):
                if route.source == index:
                    gradients[route.key] = self._copier.receive(
                        ctx.pop(get_skip_tensor_gradient_field_name(number)), index
                    )
            input_gradients = micro.cells[index].backward(gradients, micro.sums[index].add)
            sent = (
                self._copier.send(input_gradients[None], index, index - 1, micro.index)
                if index
                else PendingCopy(input_gradients[None])
            )
            setattr(ctx, get_input_gradient_field_name(index), sent)
            for number, route in enumerate(self._routes):
                if route.target == index:
                    back = self._copier.send(input_gradients[route.key], index, route.source, micro.index)
                    setattr(ctx, get_skip_tensor_gradient_field_name(number), back)

    @contextmanager
    def _enter_partition_device_and_streams(self, micro: MicroBatch, index: int, phase: str) -> Iterator[None]:
        """Context of a partition's device, the caller's streams, torchgpipe's profiler range, and a note on errors."""
        partition = self._partitions[index]
        with ExitStack() as stack:
            stack.callback(setattr, _current, "schedulers", _current.schedulers)
            _current.schedulers = micro.schedulers
            for stream in micro.streams:
                stack.enter_context(torch.cuda.stream(stream))
            if partition.device.type == "cuda":
                stack.enter_context(torch.cuda.device(partition.device))
            traced = micro.schedulers[-1].is_tracing
            stack.enter_context(profiler_range(f"chunk{micro.index}-part{index}", traced))
            try:
                yield
            except BaseException as error:
                rows = f" ({micro.rows} row{'s' if micro.rows > 1 else ''})"
                error.add_note(f"In the {phase} of {partition.name}, micro-batch {micro.index} of {micro.count}{rows}.")
                raise


class Scheduler:
    """Plans of a pipe, and the pipelines that run them."""

    def __init__(self, partitions: Sequence[Partition], routes: Sequence[SkipRoute]) -> None:
        tasks = _PartitionTaskFunctions(partitions, routes)
        plans = build_gpipe_and_1f1b_plans(len(partitions), routes, tasks.forward, tasks.recompute, tasks.backward)
        self.plans: dict[str, PipelinePlan] = {plan.name: plan for plan in plans}
        self._pipelines: dict[str, SWPipeline] = {}
        self._running = threading.Lock()  # serializes callers in several threads
        self._process = os.getpid()
        self._lost: list[Any] = []  # pipelines of the parent process, whose threads do not exist after a fork
        self.is_tracing = False
        self._keep: int | None = None
        # For each traced plan: the first iteration of each mini-batch, and its micro-batches.
        self._traced: dict[str, deque[tuple[int, list[_Traced]]]] = {}

    def run(
        self, plan: str, micro_batches: Sequence[MicroBatch], result_of: Callable[[IterContext], Result]
    ) -> list[Result]:
        """Run micro-batches under a plan."""
        self._refuse_reentry("called")
        for micro in micro_batches:
            micro.schedulers = (*_current.schedulers, self)
        with self._running:
            return self._run_micro_batches(plan, micro_batches, result_of)

    def _refuse_reentry(self, action: str) -> None:
        """Refuse calls from a layer, hook or loss function of this pipe, which would deadlock."""
        if self in _current.schedulers:
            raise SetupError(
                f"a pipe is {action} by a layer, hook or loss function that the same pipe runs, which would deadlock."
                " Wait until its forward, loss or backward has returned, or use another Pipe"
            )

    def _run_micro_batches(
        self, plan: str, micro_batches: Sequence[MicroBatch], result_of: Callable[[IterContext], Result]
    ) -> list[Result]:
        if self._process != os.getpid():
            self._lost.append(self._pipelines)
            self._pipelines, self._process = {}, os.getpid()
        pipeline = self._pipelines.get(plan)
        if pipeline is None:
            pipeline = self._pipelines[plan] = SWPipeline(self.plans[plan])
            if self.is_tracing:
                pipeline.start_trace(self._keep)
        if self.is_tracing:
            of_plan = self._traced.setdefault(plan, deque(maxlen=self._keep))
            traced = [(micro.index, [cell.checkpointed for cell in micro.cells]) for micro in micro_batches]
            of_plan.append((pipeline.num_started, traced))
        source = iter(micro_batches)
        try:
            return [result_of(pipeline.progress(source)) for _ in micro_batches]
        except BaseException as error:
            # Batches still in flight must not mix with the next mini-batch.
            self._pipelines.pop(plan).close()
            self._traced.pop(plan, None)
            if isinstance(error, TaskError) and error.__cause__ is not None:
                raise error.__cause__ from None
            raise

    def start_trace(self, max_spans: int | None = None) -> None:
        """Record start and end of each task."""
        self.is_tracing, self._keep = True, max_spans
        self._traced.clear()
        for pipeline in self._pipelines.values():
            pipeline.start_trace(max_spans)

    def stop_trace(self) -> list[TaskSpan]:
        """Stop recording and return the spans, sorted by end time. Their *iteration* is the micro-batch's index."""
        self.is_tracing = False
        spans = []
        for plan, pipeline in self._pipelines.items():
            # The engine numbers iterations over all mini-batches, and backward starts with the last micro-batch.
            traced = {
                first + place: micro
                for first, micro_batches in self._traced.get(plan, ())
                for place, micro in enumerate(micro_batches)
            }
            for span in pipeline.stop_trace():
                if span.iteration in traced:
                    index, recomputes = traced[span.iteration]
                    kind, partition = parse_task_name(span.task)
                    if kind != "Recompute" or recomputes[partition]:  # plans contain this task for all partitions
                        spans.append(replace(span, iteration=index))
        self._traced.clear()
        return sorted(spans, key=lambda span: span.end)

    def close(self) -> None:
        """End the worker threads; the next mini-batch starts new threads."""
        self._refuse_reentry("closed")
        while self._pipelines and self._process == os.getpid():
            self._pipelines.popitem()[1].close()


@contextmanager
def _without_autocast() -> Iterator[None]:
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield
