"""Evaluation of a model whose training is under way: by tasks, a plan and a rewrite of its own.

Tested in ``tests/recsys/tasks/test_train_pipeline.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_pipe.engine import IterContext, PipelinePlan, SWPipeline
from lightning_pipe.recsys.plans.named import evaluation_plan
from lightning_pipe.recsys.tasks.session import RecsysSession

__all__ = ["PipelinedEvaluation"]


class PipelinedEvaluation:
    """Runs a model on batches that are not trained, as far ahead as the plan of its training says.

    Made while training is set aside (:meth:`RecsysSession.set_aside`); every rank makes it.

    Args:
        session: session of the model.
        step: name of the model's method that a batch is evaluated with.
        training: plan of the training.
        transfer: moves a batch to the device.
        actions: other arguments of :class:`~lightning_pipe.recsys.tasks.actions.RecsysActions`.

    Attributes:
        pipeline: pipeline of the evaluation.
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
    def alone(self) -> bool:
        """Whether the next batch must be evaluated alone, all tasks in serial order."""
        return self._rewrite.records and not self._rewrite.resolved

    @contextmanager
    def attached(self) -> Generator[None, None, None]:
        """Context in which the model is rewritten; training is set aside around it."""
        self._rewrite.attach()
        try:
            yield
        finally:
            self._rewrite.detach()

    def run(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        """What the step returns for each batch, in evaluation mode, under ``no_grad``.

        Afterwards, also where the caller stops before the end, the model's modules are in the modes that they were in.
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
                    # Not around the yield: the mode would be the caller's too.
                    with torch.no_grad():
                        ctx = self._next(batches)
                except StopIteration:
                    return
                yield ctx.output

    def _next(self, batches: Iterator[Any]) -> IterContext:
        if self.alone and not self.pipeline.in_flight:
            self.pipeline.begin_serial(batches)
            return self.pipeline.finish()
        return self.pipeline.progress(batches)

    def close(self) -> None:
        """End the worker threads and put the model back. May be called again."""
        self.pipeline.close()
        self._rewrite.restore()


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training
