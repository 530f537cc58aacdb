"""A period of a pipeline in steps, for a caller with hooks between its tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_pipe.engine.common.errors import PlanError
from lightning_pipe.engine.plans.schedule import MAIN
from lightning_pipe.engine.plans.task import IterContext
from lightning_pipe.engine.runtime.periods import Periods, ends_on_interrupt


class Steps(Periods):
    """Opens a period, runs it up to a task, lets the caller do the work of a task, and finishes the period."""

    @ends_on_interrupt
    def fill_pipeline(self, data_iter: Iterator[Any]) -> None:
        """Start the iterations that run ahead, so that the next period can train the oldest one.

        Does nothing if iterations are in flight.
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
    def begin(self, data_iter: Iterator[Any]) -> IterContext:
        """Open the next period: fill the pipeline if it is empty, and start one new iteration."""
        self._check_usable()
        if not self._in_flight:
            self.fill_pipeline(data_iter)
        # After the end of the data there is a gap; an iteration started after it would miss its first stages.
        if self._fetched - self._trained == self.plan.max_stage:
            self._fetch(data_iter)
        if not self._in_flight:
            raise StopIteration
        return self._begin_period(self._plan_ops, serial=False)

    @ends_on_interrupt
    def begin_serial(self, data_iter: Iterator[Any]) -> IterContext:
        """Open a period that runs one new iteration alone: all tasks in serial order in the calling thread."""
        self._check_usable()
        self._check_empty()
        self._restart()
        if not self._fetch(data_iter):
            raise StopIteration
        return self._begin_period(self._serial_ops, serial=True)

    @ends_on_interrupt
    def run_until(self, task: str) -> None:
        """Run the tasks of the open period in order, up to and including *task*.

        Does nothing if *task* has already run.
        """
        self._check_running()
        target = self._position(task)
        while self._cursor <= target:
            self._advance()

    @ends_on_interrupt
    def wait_for(self, task: str) -> None:
        """Wait until a task that ran ahead has run for the batch of the open period, in whatever thread it runs.

        The current stream waits for the task's work on its stream.
        """
        self._check_running()
        position = self._position(task)
        op = self._ops[position]
        if self._cursor <= position and (self._serial or not op.stage):
            raise PlanError(
                f"task {task!r} of iteration {self._trained} has not been submitted yet; call run_until({task!r}) first"
            )
        if not self._serial:
            self._executor.wait_for(op, self._in_flight[self._trained])

    @ends_on_interrupt
    def begin_task(self, task: str) -> IterContext:
        """Run all tasks before *task* and wait for its dependencies, so that the caller can do its work.

        For work that the caller must do between its own hooks, such as an optimizer step inside Lightning. Call
        :meth:`end_task` afterwards. Only tasks of stage 0 in the group "main" and on the current stream can be run in
        this way. A globally ordered task holds its turn until then.
        """
        self._check_running()
        target = self._position(task)
        where = self.plan.schedule[task]
        if where.stage != 0 or where.thread_group != MAIN or where.stream is not None:
            raise PlanError(
                f"task {task!r} is scheduled as {where}; only a task of stage 0 in group {MAIN!r}, without a named"
                " stream, can be run by the caller"
            )
        if self._cursor > target:
            raise PlanError(
                f"task {task!r} of iteration {self._trained} has run already; call begin_task() earlier in the period"
            )
        while self._cursor < target:
            self._advance()
        op, slot = self._ops[target], self._in_flight[self._trained]
        self._begun = (op, self._executor.enter(op, slot))
        assert slot.ctx is not None
        return slot.ctx

    @ends_on_interrupt
    def end_task(self, task: str) -> None:
        """End a task that :meth:`begin_task` began."""
        if self._begun is None or self._begun[0].name != task:
            raise PlanError(f"task {task!r} was not begun; call begin_task({task!r}) first")
        op, entered = self._begun
        self._begun = None
        self._cursor += 1
        self._executor.leave(op, self._in_flight[self._trained], entered)

    @ends_on_interrupt
    def finish(self) -> IterContext:
        """Run the remaining tasks of the open period and retire the iteration that it trained."""
        self._check_running()
        while self._cursor < len(self._ops):
            self._advance()
        ctx = self._executor.retire(self._in_flight[self._trained])
        del self._in_flight[self._trained]
        self._trained += 1
        self._open = False
        return ctx

    def _drop_begun(self) -> None:
        """Forget a task that the caller has begun, so that workers do not wait for its turn to end."""
        if self._begun is not None:
            self._executor.drop(self._begun[1])
            self._begun = None
