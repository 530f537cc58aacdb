"""Evaluation of a model during its training, with a separate rewrite, plan and tasks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_pipe.engine import IterContext, PipelinePlan, SWPipeline
from lightning_pipe.recsys.plans.recsys_plans import evaluation_plan
from lightning_pipe.recsys.tasks.session import RecsysSession, next_must_run_serially


class PipelinedEvaluation:
    """Runs a model on batches without training them, as far ahead as the plan of its training.

    Built on every rank while training is suspended (:meth:`RecsysSession.suspend_training`).
    """

    def __init__(
        self,
        session: RecsysSession,
        step: str,
        training: PipelinePlan,
        *,
        transfer: Callable[[Any], Any],
        **actions: Any,
    ) -> None:
        self._model = session.module
        self._rewrite, tasks = session.evaluation_tasks(step, transfer=transfer, **actions)
        self.pipeline = SWPipeline(evaluation_plan(training, tasks), session.device, session.world)

    @property
    def runs_next_serially(self) -> bool:
        """True if the next batch must be evaluated alone, with all tasks in serial order."""
        return next_must_run_serially(self._rewrite, self.pipeline.plan)

    @contextmanager
    def attached(self) -> Generator[None, None, None]:
        """Context in which the model is rewritten, inside the context that suspends training."""
        self._rewrite.attach()
        try:
            yield
        finally:
            self._rewrite.detach()

    def run(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        """Yield the step's output for each batch, in evaluation mode and under ``no_grad``.

        At the end, or if the caller stops early, the model's modules return to their previous modes.
        """
        modes = [(module, module.training) for module in self._model.modules()]
        with ExitStack() as undo:
            undo.callback(self._rewrite.detach)
            undo.callback(self.pipeline.abandon)
            undo.callback(_set_modes, modes)
            self._model.eval()
            self._rewrite.attach()
            while True:
                try:
                    # The yield is outside of this context, or the caller would run under no_grad too.
                    with torch.no_grad():
                        ctx = self._next(batches)
                except StopIteration:
                    return
                yield ctx.output

    def _next(self, batches: Iterator[Any]) -> IterContext:
        if self.runs_next_serially and not self.pipeline.in_flight:
            self.pipeline.begin_serial_period(batches)
            return self.pipeline.finish_period()
        return self.pipeline.progress(batches)

    def close(self) -> None:
        """End the worker threads and restore the model. May be called again."""
        self.pipeline.close()
        self._rewrite.restore()


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training
