"""Runs mini-batches: partitions at micro-batches, by the engine, in one worker thread for each partition."""

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
from lightning_pipe.pipe.cell import Cell, Gradients, Passed
from lightning_pipe.pipe.copies import Copier, Sent
from lightning_pipe.pipe.gradients import GradientSums
from lightning_pipe.pipe.partition import Partition
from lightning_pipe.pipe.plans import (
    backward_plan,
    forward_plan,
    gradient_field,
    one_forward_one_backward_plan,
    skip_field,
    skip_gradient_field,
    value_field,
    work_of,
)
from lightning_pipe.pipe.skip import SkipRoute

__all__ = ["MicroBatch", "Scheduler"]

Result = TypeVar("Result")


@dataclass
class MicroBatch:
    """A micro-batch on its way.

    Args:
        index: of the micro-batch.
        of: how many there are.
        cells: of each partition.
        inputs: of the first layer; let go of when it has run.
        sums: where gradients of parameters go.
        given: gradients of the last layer's outputs; None where the last cell makes the loss.
        streams: the caller's, on each GPU.
        rows: of the micro-batch.
        schedulers: that run it: its own, and those of pipes whose layers call this one.
    """

    index: int
    of: int
    cells: Sequence[Cell]
    inputs: Any
    sums: Sequence[GradientSums]
    given: list[Tensor | None] | None = None
    streams: Sequence[Any] = field(default=())
    rows: int = 1
    schedulers: tuple[Scheduler, ...] = ()


@dataclass(frozen=True)
class _Traced:
    """A micro-batch of a mini-batch that is traced.

    Args:
        index: of the micro-batch.
        recomputing: indices of the partitions that run their layers again before the backward.
    """

    index: int
    recomputing: frozenset[int]

    @classmethod
    def of(cls, micro: MicroBatch) -> _Traced:
        return cls(micro.index, frozenset(place for place, cell in enumerate(micro.cells) if cell.checkpointed))

    def has(self, task: str) -> bool:
        """Whether the task has work to do: a plan recomputes in every backward, and not every partition needs it."""
        what, partition = work_of(task)
        return what != "Recompute" or partition in self.recomputing


class _CurrentSchedulers(threading.local):
    """Schedulers that run the calling thread, the outermost first."""

    schedulers: tuple[Scheduler, ...] = ()


_current = _CurrentSchedulers()


class _Tasks:
    """What the tasks of a pipe's plans do.

    They hold nothing that runs them: a pipe that nobody has any more ends without waiting for the garbage collector.

    Args:
        partitions: in order.
        routes: of the skips between them.
    """

    def __init__(self, partitions: Sequence[Partition], routes: Sequence[SkipRoute]) -> None:
        self._partitions = list(partitions)
        self._routes = list(routes)
        self._copier = Copier([partition.device for partition in partitions])

    def forward(self, index: int, ctx: IterContext) -> None:
        micro: MicroBatch = ctx.batch
        with self._at(micro, index, "forward"):
            if index == 0:
                value, micro.inputs = micro.inputs, None
            else:
                value = (self._copier.receive(_take(ctx, value_field(index)), index),)
            skips = {
                route.key: self._copier.receive(_take(ctx, skip_field(number)), index)
                for number, route in enumerate(self._routes)
                if route.target == index
            }
            out = micro.cells[index].forward(Passed(value, skips))
            last = index == len(self._partitions) - 1
            sent = Sent(out.value) if last else self._copier.send(out.value, index, index + 1)
            setattr(ctx, value_field(index + 1), sent)
            for number, route in enumerate(self._routes):
                if route.source == index:
                    setattr(ctx, skip_field(number), self._copier.send(out.skips[route.key], index, route.target))

    def recompute(self, index: int, ctx: IterContext) -> None:
        micro: MicroBatch = ctx.batch
        cell = micro.cells[index]
        if cell.checkpointed:
            with self._at(micro, index, "recomputation"):
                cell.recompute()

    def backward(self, index: int, ctx: IterContext) -> None:
        micro: MicroBatch = ctx.batch
        # With the loss inside, nobody has left the autocast of forward, as a caller of backward() does.
        inside = micro.given is None
        with self._at(micro, index, "backward"), _without_autocast() if inside else nullcontext():
            gradients: Gradients = {}
            if index < len(self._partitions) - 1:
                gradients[None] = self._copier.receive(_take(ctx, gradient_field(index + 1)), index)
            elif micro.given is not None:
                gradients[None] = micro.given
            for number, route in enumerate(self._routes):
                if route.source == index:
                    gradients[route.key] = self._copier.receive(_take(ctx, skip_gradient_field(number)), index)
            found = micro.cells[index].backward(gradients, micro.sums[index].add)
            sent = self._copier.send(found[None], index, index - 1) if index else Sent(found[None])
            setattr(ctx, gradient_field(index), sent)
            for number, route in enumerate(self._routes):
                if route.target == index:
                    back = self._copier.send(found[route.key], index, route.source)
                    setattr(ctx, skip_gradient_field(number), back)

    def _at(self, micro: MicroBatch, index: int, what: str) -> _PartitionContext:
        return _PartitionContext(self._partitions[index], micro, what)


class Scheduler:
    """The plans of a pipe, and the pipelines that run them.

    Args:
        partitions: in order.
        routes: of the skips between them.
    """

    def __init__(self, partitions: Sequence[Partition], routes: Sequence[SkipRoute]) -> None:
        n, tasks = len(partitions), _Tasks(partitions, routes)
        plans = [
            forward_plan(n, routes, tasks.forward),
            backward_plan(n, routes, tasks.recompute, tasks.backward),
            one_forward_one_backward_plan(n, routes, tasks.forward, tasks.recompute, tasks.backward),
        ]
        self.plans: dict[str, PipelinePlan] = {plan.name: plan for plan in plans}
        self._pipelines: dict[str, SWPipeline] = {}
        self._running = threading.Lock()  # callers from several threads take turns
        self._process = os.getpid()
        self._lost: list[Any] = []  # of a process that was forked from: their threads are not in this one
        self._tracing = False
        self._keep: int | None = None
        # Of each plan, while it is traced: the first iteration of each mini-batch, and its micro-batches.
        self._traced: dict[str, deque[tuple[int, list[_Traced]]]] = {}

    def run(
        self, plan: str, micro_batches: Sequence[MicroBatch], result_of: Callable[[IterContext], Result]
    ) -> list[Result]:
        """Run micro-batches under a plan.

        Args:
            plan: name of the plan.
            micro_batches: in the plan's order.
            result_of: called with each one's context as soon as it is done, in order; the context is then released.

        Returns:
            The results, in the order of *micro_batches*.

        Raises:
            SetupError: the calling thread is running a layer, hook or loss function of this pipe.
            Exception: what a layer raised, with a note that says where; the pipe can be used again.
        """
        self._check_outside("called")
        for micro in micro_batches:
            micro.schedulers = (*_current.schedulers, self)
        with self._running:
            return self._run(plan, micro_batches, result_of)

    def _check_outside(self, what: str) -> None:
        """Refuse to wait for a mini-batch that waits for the calling thread."""
        if self in _current.schedulers:
            raise SetupError(
                f"a pipe is {what} by a layer, hook or loss function that it runs itself, which would wait for ever;"
                " do that once its forward, loss or backward has returned, or call another Pipe there"
            )

    def _run(
        self, plan: str, micro_batches: Sequence[MicroBatch], result_of: Callable[[IterContext], Result]
    ) -> list[Result]:
        if self._process != os.getpid():
            self._lost.append(self._pipelines)
            self._pipelines, self._process = {}, os.getpid()
        pipeline = self._pipelines.get(plan)
        if pipeline is None:
            pipeline = self._pipelines[plan] = SWPipeline(self.plans[plan])
            if self._tracing:
                pipeline.start_trace(self._keep)
        if self._tracing:
            of_plan = self._traced.setdefault(plan, deque(maxlen=self._keep))
            of_plan.append((pipeline.started, [_Traced.of(micro) for micro in micro_batches]))
        source = iter(micro_batches)
        try:
            return [result_of(pipeline.progress(source)) for _ in micro_batches]
        except BaseException as error:
            # What is in flight must not meet the next mini-batch.
            self._pipelines.pop(plan).close()
            self._traced.pop(plan, None)
            if isinstance(error, TaskError) and error.__cause__ is not None:
                raise error.__cause__ from None
            raise

    def start_trace(self, keep: int | None = None) -> None:
        """Record when each task runs; keep the latest *keep* of each plan, or all."""
        self._tracing, self._keep = True, keep
        self._traced.clear()
        for pipeline in self._pipelines.values():
            pipeline.start_trace(keep)

    def stop_trace(self) -> list[TaskSpan]:
        """Stop recording; returns the spans in the order in which they ended, an iteration being a micro-batch."""
        self._tracing = False
        spans = []
        for plan, pipeline in self._pipelines.items():
            # The engine counts iterations on and on, and a backward begins with the last micro-batch.
            traced = {
                first + place: micro
                for first, micro_batches in self._traced.get(plan, ())
                for place, micro in enumerate(micro_batches)
            }
            spans += [
                replace(span, iteration=traced[span.iteration].index)
                for span in pipeline.stop_trace()
                if span.iteration in traced and traced[span.iteration].has(span.task)
            ]
        self._traced.clear()
        return sorted(spans, key=lambda span: span.end)

    def close(self) -> None:
        """End the worker threads; the next mini-batch starts others.

        Raises:
            SetupError: as :meth:`run`.
        """
        self._check_outside("closed")
        while self._pipelines and self._process == os.getpid():
            self._pipelines.popitem()[1].close()


class _PartitionContext(ExitStack):
    """On a partition's device, in the caller's stream; an error says where it was."""

    def __init__(self, partition: Partition, micro: MicroBatch, what: str) -> None:
        super().__init__()
        self._partition, self._micro, self._what = partition, micro, what

    def __enter__(self) -> _PartitionContext:
        super().__enter__()
        self.callback(setattr, _current, "schedulers", _current.schedulers)
        _current.schedulers = self._micro.schedulers
        for stream in self._micro.streams:
            self.enter_context(torch.cuda.stream(stream))
        if self._partition.device.type == "cuda":
            self.enter_context(torch.cuda.device(self._partition.device))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool | None:
        if error is not None:
            micro = self._micro
            rows = f" ({micro.rows} row{'s' if micro.rows > 1 else ''})"
            error.add_note(
                f"In the {self._what} of {self._partition.name}, micro-batch {micro.index} of {micro.of}{rows}."
            )
        return super().__exit__(kind, error, traceback)


@contextmanager
def _without_autocast() -> Iterator[None]:
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _take(ctx: IterContext, field: str) -> Sent:
    """A field's value, which the context then holds no longer."""
    value: Sent = getattr(ctx, field)
    delattr(ctx, field)
    return value
