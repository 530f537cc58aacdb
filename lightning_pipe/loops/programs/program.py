"""Programs: the points of a pipeline's plan at which Lightning's hooks run.

A strategy with its own plan builds a :class:`TrainingProgram`. The loop opens a period for each batch. Lightning calls
the strategy's ``training_step``, ``backward`` and ``optimizer_step`` at their usual places, and each call advances the
period::

    loop      begin ........... on_train_batch_start .................................... finish . on_train_batch_end
    Lightning                                        optimizer_step(closure)
    closure                                           training_step  zero_grad  backward
    tasks     ahead | transfer |                      .. | forward |            .. | backward | step | ahead |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from lightning_pipe.engine import IterContext, SetupError, SWPipeline, TrainingContext
from lightning_pipe.engine.plans.schedule import MAIN
from lightning_pipe.engine.runtime.record_stream import record_stream


class TrainingProgram:
    """A pipeline and the names of the tasks between which Lightning's hooks run.

    Args:
        pipeline: pipeline; the program closes it.
        transfer: name of the task that moves the batch to the device. Each period runs up to it before
            ``on_train_batch_start``, so that users' transfer hooks run at a fixed point.
        step: name of the task whose work the caller does: the optimizer step, or the whole training of a batch.
        forward: name of the last task of ``training_step``; None if *step* is the whole training of a batch (default
            None).
        backward: name of the last task of ``backward`` (default None).
        last_replacing_task: name of the last task that replaces the transferred batch by another batch (default None).
            If it runs in the period of the batch that is trained, and not ahead of it, the period runs up to it before
            ``on_train_batch_start``, so that hooks see the batch that is trained.
        trains_next_alone: returns True if the next batch must be trained alone, with all tasks in serial order (default
            None: never).
        on_close: called once, when the program is closed (default None).
        on_abandon: called with the contexts of batches that will not be trained, before they are released (default
            None).

    Attributes:
        forward: as the argument; empty without one.
    """

    def __init__(
        self,
        pipeline: SWPipeline,
        *,
        transfer: str,
        step: str,
        forward: str | None = None,
        backward: str | None = None,
        last_replacing_task: str | None = None,
        trains_next_alone: Callable[[], bool] | None = None,
        on_close: Callable[[], None] | None = None,
        on_abandon: Callable[[Sequence[IterContext]], None] | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.transfer = transfer
        self.step = step
        self.forward = forward or ""
        self._backward = backward
        self._prepared = last_replacing_task
        self._alone = trains_next_alone
        self._on_close = on_close
        self._on_abandon = on_abandon
        self.current: TrainingContext | None = None

    @property
    def trains_in_one_task(self) -> bool:
        """True if the caller does the whole training of a batch in one task."""
        return not self.forward

    def begin_next_batch(self, source: Iterator[Any]) -> TrainingContext:
        """Open the period of the next batch and run it until the transfer.

        Args:
            source: iterator of batches.

        Returns:
            context of the batch.

        Raises:
            StopIteration: every batch has been trained.
        """
        alone = self._alone is not None and self.pipeline.is_empty and self._alone()
        begun = self.pipeline.begin_serial_period(source) if alone else self.pipeline.begin_period(source)
        current = self.current = cast("TrainingContext", begun)  # its tasks declare the fields
        self.pipeline.run_until(self.transfer)
        if self._prepared is not None and (alone or not self.pipeline.plan.schedule[self._prepared].stage):
            self.pipeline.run_until(self._prepared)
        for task in (self.transfer, self._prepared):
            # The hooks read the batch. If a worker transfers batches, it may still transfer this one.
            if task is not None and not alone and self.pipeline.plan.schedule[task].thread_group != MAIN:
                self.pipeline.wait_for(task)
        # Its tensors were allocated on the transfer's stream. Their memory must not be reused while this stream uses
        # them.
        record_stream(current.batch)
        return current

    def set_training_step(self, training_step: Callable[[], Any]) -> TrainingContext:
        """Let the forward task of the current batch call *training_step*.

        Returns:
            context of the batch. When its pipeline has run until :attr:`forward`, ``output`` is the step's result.

        Raises:
            SetupError: the batch's forward pass has already run, because an optimizer calls its closure more than once.
        """
        ctx = self._get_current_context()
        if ctx.has("training_step"):
            raise SetupError(
                "the optimizer called its closure a second time for one batch, but a pipelined batch has one forward"
                " pass, because its embedding lookups have already run. Use an optimizer that calls the closure once"
                " (LBFGS does not), or strategy='pipeline', which supports several calls"
            )
        ctx.training_step = training_step
        return ctx

    def run_backward(self, backward: Callable[[], None]) -> None:
        """Run the period until the backward pass is done; the backward task calls *backward*."""
        assert self._backward is not None
        self._get_current_context().run_backward = backward
        self.pipeline.run_until(self._backward)

    def begin_step_task(self) -> None:
        """Open the *step* task, whose work the caller does."""
        self.pipeline.begin_caller_task(self.step)

    def end_step_task(self) -> None:
        """Close the task that :meth:`begin_step_task` has opened."""
        self.pipeline.end_caller_task(self.step)

    def finish_batch(self) -> None:
        """Run the rest of the period and retire its batch."""
        self.current = None
        self.pipeline.finish_period()

    def abandon_batches(self) -> int:
        """Abandon the batches in flight, and return their number."""
        self.current = None
        if self._on_abandon is not None:
            self._on_abandon(self.pipeline.in_flight)
        return self.pipeline.abandon()

    def close(self) -> None:
        """Close the pipeline and call *on_close*. Later calls have no effect."""
        self.current = None
        self.pipeline.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def _get_current_context(self) -> TrainingContext:
        assert self.current is not None, "called within a period"
        return self.current


class EvaluationProgram(TrainingProgram):
    """Program of an evaluation, whose *forward* and *step* name the task that calls the user's step.

    Args:
        pipeline: see :class:`TrainingProgram`, also for the other arguments.
        evaluation_context: returns a context manager that is entered before the evaluation uses the program, and left
            afterwards (default: no context).
    """

    def __init__(
        self,
        pipeline: SWPipeline,
        *,
        transfer: str,
        step: str,
        forward: str | None = None,
        trains_next_alone: Callable[[], bool] | None = None,
        evaluation_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(
            pipeline,
            transfer=transfer,
            step=step,
            forward=forward,
            trains_next_alone=trains_next_alone,
            on_close=on_close,
        )
        self.evaluation_context = evaluation_context
