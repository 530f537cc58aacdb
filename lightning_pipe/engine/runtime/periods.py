"""The open period of a pipeline and the batches in flight: fetching, starting, running a period step by step.

Tested in ``tests/engine/runtime/test_pipeline.py``.
"""

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

__all__ = ["Periods", "ends_on_interrupt"]


S = TypeVar("S", bound="Periods")
P = ParamSpec("P")
T = TypeVar("T")


def ends_on_interrupt(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], T]:
    """A method during which an interrupt ends the pipeline: it can come between any two lines, in a hand-off, say."""

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
    """The state of a pipeline between two calls, and the steps that change it.

    Args:
        plan: the plan to run.
        device: the device of the plan's streams.
        group: process group over which ranks compare their plans before the first period; None for one rank.
    """

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

        self._open = False  # whether there is a period,
        self._trained = 0  # the iteration it trains,
        self._serial = False  # whether that one runs alone, in serial order,
        self._ops = self._plan_ops  # what the period runs,
        self._cursor = 0  # how far it has come,
        self._begun: tuple[Operation, Entered] | None = None  # and what the caller runs itself

    @property
    def meter(self) -> Meter | None:
        """What adds up the calling thread's time; set it between periods, None for nothing."""
        return self._executor.meter

    @meter.setter
    def meter(self, meter: Meter | None) -> None:
        self._executor.meter = meter

    def _restart(self) -> None:
        self._trained = self._fetched
        self._executor.restart(self._trained)

    def _agree(self) -> None:
        # Before the first fetch: a rank whose data is empty must answer the others too.
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
        # While the pipeline drains, the later iterations are missing.
        slot = self._in_flight.get(self._trained if self._serial else self._trained + op.stage)
        if slot is not None:
            self._executor.run(op, slot, self._serial)

    def _position(self, task: str) -> int:
        for position, op in enumerate(self._ops):
            if op.name == task:
                return position
        raise PlanError(f"the plan has no task {task!r}; its tasks are {', '.join(self.plan.tasks)}")

    def _check_usable(self) -> None:
        """A new period can begin."""
        self._check_alive()
        if self._open:
            raise PlanError(f"the period of iteration {self._trained} is open; call finish() or abandon() first")

    def _check_running(self) -> None:
        """The open period can go on."""
        self._check_alive()
        if not self._open:
            raise PlanError("no period is open; call begin(data_iter) first")
        if self._begun is not None:
            name = self._begun[0].name
            raise PlanError(f"task {name!r} of iteration {self._trained} is begun; call end_task({name!r}) first")

    def _check_alive(self) -> None:
        if self._closed:
            raise PlanError(f"pipeline {self.plan.name!r} is closed; build a new one")
        self._executor.raise_failure()

    def _check_empty(self) -> None:
        if self._in_flight:
            raise PlanError(
                f"pipeline {self.plan.name!r} has {len(self._in_flight)} batches in flight; a serial iteration needs"
                " none: call drain() first"
            )
