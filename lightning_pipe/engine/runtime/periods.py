"""State of a pipeline: the open period and the batches in flight. Fetches, starts and advances iterations."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.observe.meter import Meter
from lightning_pipe.engine.plans.plan import PipelinePlan
from lightning_pipe.engine.plans.task import IterContext
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.engine.runtime.executor import Entered, Executor, Operation, Slot

S = TypeVar("S", bound="Periods")
P = ParamSpec("P")
T = TypeVar("T")


def ends_on_interrupt(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], T]:
    """Let an interrupt end the pipeline: between any two lines, it may leave the state inconsistent."""

    @functools.wraps(method)
    def guarded(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except Exception:
            raise
        except BaseException as error:
            self._executor.failed(error, "between tasks", self._trained, 0)
            raise

    return guarded


class Periods:
    """State of a pipeline between two calls, and the steps that change it."""

    def __init__(self, plan: PipelinePlan, device: torch.device, group: dist.ProcessGroup | None) -> None:
        self.plan = plan
        self._group = group
        self._device = device
        self._executor = Executor(plan, device)
        self._serial_ops = self._executor.operations
        by_name = {op.name: op for op in self._serial_ops}
        self._plan_ops = [by_name[name] for name in plan.order]

        self._in_flight: dict[int, Slot] = {}
        self._fetched = 0  # iterations started, over the life of the pipeline
        self._source: Iterator[Any] | None = None
        self._exhausted = False
        self._agreed = False
        self._closed = False

        self._open = False  # True while a period is open
        self._trained = 0  # iteration that the open period trains
        self._serial = False  # True if that iteration runs alone, in serial order
        self._ops = self._plan_ops  # operations of the open period
        self._cursor = 0  # index of the next operation
        self._begun: tuple[Operation, Entered] | None = None  # task that the caller is running

    @property
    def meter(self) -> Meter | None:
        """Meter of the calling thread's time (default None). Set it between periods."""
        return self._executor.meter

    @meter.setter
    def meter(self, meter: Meter | None) -> None:
        self._executor.meter = meter

    def _restart(self) -> None:
        self._trained = self._fetched
        self._executor.restart(self._trained)

    def _agree(self) -> None:
        # Before the first fetch, because a rank without data must also take part in the comparison.
        if not self._agreed:
            check_agreement(self.plan.description(), "plan", self._group)
            self._agreed = True

    def _fetch(self, data_iter: Iterator[Any]) -> bool:
        self._agree()
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
            failure = self._executor.failed(error, "data iterator", self._fetched, self.plan.max_stage)
            raise failure from failure.__cause__
        if self.meter is not None:
            self.meter.fetched(begun)
        self._start(batch)
        return True

    def _start(self, batch: Any) -> None:
        self._in_flight[self._fetched] = self._executor.open(self.plan.context(batch, self._fetched))
        self._fetched += 1

    def _begin_period(self, operations: list[Operation], serial: bool) -> IterContext:
        self._ops, self._serial, self._cursor, self._open = operations, serial, 0, True
        ctx = self._in_flight[self._trained].ctx
        assert ctx is not None
        return ctx

    def _advance(self) -> None:
        op = self._ops[self._cursor]
        self._cursor += 1
        # While the pipeline drains, later iterations do not exist.
        slot = self._in_flight.get(self._trained if self._serial else self._trained + op.stage)
        if slot is not None:
            self._executor.run(op, slot, self._serial)

    def _position(self, task: str) -> int:
        for position, op in enumerate(self._ops):
            if op.name == task:
                return position
        raise PlanError(f"the plan has no task {task!r}; its tasks are {', '.join(self.plan.tasks)}")

    def _check_usable(self) -> None:
        """Raise an error unless a new period can begin."""
        self._check_alive()
        if self._open:
            raise PlanError(f"the period of iteration {self._trained} is open; call finish() or abandon() first")

    def _check_running(self) -> None:
        """Raise an error unless the open period can continue."""
        self._check_alive()
        if not self._open:
            raise PlanError("no period is open; call begin(data_iter) first")
        if self._begun is not None:
            name = self._begun[0].name
            raise PlanError(f"task {name!r} of iteration {self._trained} has begun; call end_task({name!r}) first")

    def _check_alive(self) -> None:
        if self._closed:
            raise PlanError(f"pipeline {self.plan.name!r} is closed; build a new one")
        self._executor.raise_failure()

    def _check_empty(self) -> None:
        if self._in_flight:
            raise PlanError(
                f"pipeline {self.plan.name!r} has {len(self._in_flight)} batches in flight, but a serial iteration must"
                " run alone; call drain() first"
            )
