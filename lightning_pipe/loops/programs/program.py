"""Where a pipeline's tasks meet Lightning's hooks.

A strategy that brings a plan builds a :class:`TrainingProgram`; the loop opens a period for each batch, and the
strategy's own ``training_step``, ``backward`` and ``optimizer_step``, which Lightning calls at their usual places, move
the period on::

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
from lightning_pipe.engine.runtime.record_use import record_use


class TrainingProgram:
    """A pipeline and the names of the tasks at which Lightning's hooks cut its periods.

    Args:
        pipeline: the pipeline; the program closes it.
        transfer: the task that moves the batch to the device. A period runs up to it before ``on_train_batch_start``,
            so that users' transfer hooks have a fixed place.
        step: the task whose work the caller does: the optimiser step, or the whole training of a batch.
        forward: the last task of ``training_step``; with *backward*, the calls the strategy makes.
        backward: the last task of ``backward``.
        prepared: the last task that puts another batch in the place of the transferred one, if any does. Where it runs
            for the batch that is trained, and not ahead, the period runs up to it too: hooks see what is trained.
        alone: whether the next batch must be trained alone, all tasks in serial order.
        on_close: called once, when the program is closed.
        on_give_up: called with the contexts of batches that are not going to be trained, before they are let go of.
    """

    def __init__(
        self,
        pipeline: SWPipeline,
        *,
        transfer: str,
        step: str,
        forward: str | None = None,
        backward: str | None = None,
        prepared: str | None = None,
        alone: Callable[[], bool] | None = None,
        on_close: Callable[[], None] | None = None,
        on_give_up: Callable[[Sequence[IterContext]], None] | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.transfer = transfer
        self.step = step
        self._forward = forward
        self._backward = backward
        self._prepared = prepared
        self._alone = alone
        self._on_close = on_close
        self._on_give_up = on_give_up
        self.current: TrainingContext | None = None

    @property
    def steps_whole_batch(self) -> bool:
        """Whether the caller does all of a batch's training in one task."""
        return self._forward is None

    def begin(self, source: Iterator[Any]) -> TrainingContext:
        """Open the period of the next batch and run it until the transfer.

        Raises:
            StopIteration: every batch has been trained.
        """
        alone = self._alone is not None and not self.pipeline.in_flight and self._alone()
        begun = self.pipeline.begin_serial(source) if alone else self.pipeline.begin(source)
        current = self.current = cast("TrainingContext", begun)  # where steps are cut, its tasks say so
        self.pipeline.run_until(self.transfer)
        if self._prepared is not None and (alone or not self.pipeline.plan.schedule[self._prepared].stage):
            self.pipeline.run_until(self._prepared)
        # Its tensors were made on the transfer's stream: their memory may not be re-used while this stream uses them.
        record_use(current.batch)
        return current

    def run_forward(self, training_step: Callable[[], Any]) -> Any:
        """Run the period until the forward pass is done; the forward task calls *training_step*.

        Returns:
            What *training_step* returned.

        Raises:
            SetupError: the batch's forward pass has run already: an optimiser calls its closure more than once.
        """
        assert self._forward is not None
        ctx = self._current()
        if ctx.has("training_step"):
            raise SetupError(
                "the optimiser called its closure a second time for one batch, but a pipelined batch has one forward"
                " pass: its embedding lookups are done. Use an optimiser that calls the closure once (LBFGS does not)"
                " or strategy='pipeline', which allows it"
            )
        ctx.training_step = training_step
        self.pipeline.run_until(self._forward)
        return ctx.output

    def run_backward(self, backward: Callable[[], None]) -> None:
        """Run the period until the backward pass is done; the backward task calls *backward*."""
        assert self._backward is not None
        self._current().run_backward = backward
        self.pipeline.run_until(self._backward)

    def begin_step(self) -> None:
        """Open the task whose work the caller does."""
        self.pipeline.begin_task(self.step)

    def end_step(self) -> None:
        """Close what :meth:`begin_step` opened."""
        self.pipeline.end_task(self.step)

    def finish(self) -> None:
        """Run the rest of the period and retire its batch."""
        self.current = None
        self.pipeline.finish()

    def abandon(self) -> int:
        """Give up the batches in flight, returning how many those were."""
        self.current = None
        if self._on_give_up is not None:
            self._on_give_up(self.pipeline.in_flight)
        return self.pipeline.abandon()

    def close(self) -> None:
        """Close the pipeline and what belongs to it; may be called again."""
        self.current = None
        self.pipeline.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def _current(self) -> TrainingContext:
        if self.current is None:
            raise SetupError(
                "training_step was called outside the pipeline's training loop; call the module's methods directly"
                " there, or let Trainer.fit call the strategy"
            )
        return self.current


class EvaluationProgram(TrainingProgram):
    """A pipeline that evaluates: its *forward* and *step* are the task that calls the user's step.

    Args:
        pipeline: see :class:`TrainingProgram`, as for the others.
        transfer: see there.
        step: see there.
        forward: see there.
        alone: see there.
        around: entered for each run of the evaluation, and left when it is over.
        on_close: see there.
    """

    def __init__(
        self,
        pipeline: SWPipeline,
        *,
        transfer: str,
        step: str,
        forward: str | None = None,
        alone: Callable[[], bool] | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(pipeline, transfer=transfer, step=step, forward=forward, alone=alone, on_close=on_close)
        self.around = around
