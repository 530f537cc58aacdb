"""Evaluation of a model whose training is under way: by tasks, a plan and a rewrite of its own.

Tested in ``tests/recsys/tasks/test_train_pipeline.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from lightning_pipe.engine import IterContext, PipelinePlan, SWPipeline
from lightning_pipe.recsys.kernels.fused import prefetches_set_aside
from lightning_pipe.recsys.modules.ids_on_wire import IdsOnWire
from lightning_pipe.recsys.plans.named import evaluation_plan
from lightning_pipe.recsys.rewrite.model_rewrite import ModelRewrite
from lightning_pipe.recsys.tasks.training import RecsysActions, recsys_tasks

__all__ = ["PipelinedEvaluation", "training_set_aside"]


@contextmanager
def training_set_aside(pipeline: SWPipeline, rewrite: ModelRewrite) -> Generator[None, None, None]:
    """In the body the model is as if no batch were in training; those in flight stay so.

    Args:
        pipeline: of the training.
        rewrite: of the training, detached in the body.
    """
    pipeline.settle()  # a worker may be fetching rows for a batch in training
    with prefetches_set_aside(rewrite.modules.values()):
        rewrite.detach()
        try:
            yield
        finally:
            rewrite.attach()


class PipelinedEvaluation:
    """Runs a model on batches that are not trained, as far ahead as the plan of its training says.

    Args:
        model: holds sharded modules, whose forwards are as they were.
        step: called with a batch on the device; returns what the evaluation is for.
        transfer: moves a batch to the device.
        training: the plan of the training.
        method: see :class:`~lightning_pipe.recsys.rewrite.model_rewrite.ModelRewrite`, as for the next four.
        input_group: see there.
        validate_ids: see there.
        ids_on_wire: see there.
        free_features_early: see there.
        device: where batches are moved.
        group: over which ranks compare their plans.
        status_group: as ``input_group``.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Callable[[Any], Any],
        transfer: Callable[[Any], Any],
        training: PipelinePlan,
        *,
        method: Literal["auto", "record", "direct", "fx"],
        input_group: dist.ProcessGroup | None,
        validate_ids: bool,
        ids_on_wire: IdsOnWire,
        free_features_early: bool,
        device: torch.device,
        group: dist.ProcessGroup | None,
        status_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._model = model
        self._rewrite = ModelRewrite(
            model,
            method=method,
            step="forward",
            input_group=input_group,
            agree_group=group,
            validate_ids=validate_ids,
            ids_on_wire=ids_on_wire,
            free_features_early=free_features_early,
            status_group=status_group,
        )
        self._rewrite.detach()
        actions = RecsysActions(self._rewrite, transfer=transfer, training_step=step, loss_of=_no_loss)
        self._pipeline = SWPipeline(evaluation_plan(training, recsys_tasks(actions)), device, group)

    def run(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        """What the step returns for each batch, in evaluation mode, under ``no_grad``.

        Afterwards, also where the caller stops before the end, the model's modules are in the modes that they were in.
        """
        modes = [(module, module.training) for module in self._model.modules()]
        with ExitStack() as undo:
            undo.callback(self._rewrite.detach)
            undo.callback(self._pipeline.abandon)
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
        if self._rewrite.records and not self._rewrite.resolved and not self._pipeline.in_flight:
            self._pipeline.begin_serial(batches)
            return self._pipeline.finish()
        return self._pipeline.progress(batches)

    def close(self) -> None:
        """End the worker threads and put the model back. May be called again."""
        self._pipeline.close()
        self._rewrite.restore()


def _set_modes(modes: list[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _no_loss(output: Any) -> None:
    return None
