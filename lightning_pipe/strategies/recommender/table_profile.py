"""Profiles of the recsys tasks under a Trainer: of the module as it trains, which is not trained by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_pipe._compat.quick_lightning import call_strategy_hook
from lightning_pipe.engine import PipelinePlan, ProfileResult, SetupError, SWPipeline, TaskProfiler
from lightning_pipe.loops.data.random_streams import get_states, set_states
from lightning_pipe.recsys.plans.named import recsys_plan
from lightning_pipe.recsys.tasks.kept_model import ModelKeeper
from lightning_pipe.recsys.tasks.session import RecsysSession
from lightning_pipe.recsys.tasks.train_pipeline_checks import clipping
from lightning_pipe.strategies.recommender.without_trace import leaving_no_trace
from lightning_pipe.strategies.refusals import loss_scaler

__all__ = ["TableProfile"]


@dataclass(frozen=True)
class TableProfile:
    """A profile of a training, between two batches and not in the middle of an accumulation.

    Args:
        trainer: the trainer.
        session: session of its module, whose training is set aside.
        loss_of: gives the loss in what the module's step returned.
        plan: plan that is measured.
    """

    trainer: pl.Trainer
    session: RecsysSession
    loss_of: Callable[[Any], torch.Tensor | None]
    plan: PipelinePlan

    def measure(
        self, batches: Sequence[Any], tasks: Sequence[str] | None, rounds: int, iterations: int
    ) -> ProfileResult:
        """Profile tasks; every rank calls this at the same point.

        Args:
            batches: on the host, as loaders give them.
            tasks: by name; all by default.
            rounds: number of measurements of each.
            iterations: iterations of each measurement.

        Raises:
            SetupError: gradients of some batches are accumulated, losses are scaled, or tables have no size.
        """
        self._check()
        clip_value, session = self.trainer.gradient_clip_val, self.session
        clip = clipping(session.sharded, float(clip_value)) if clip_value else None
        rehearsal = session.rehearsal(
            "training_step",
            self.plan,
            clipped=clip is not None,
            transfer=lambda batch: call_strategy_hook(self.trainer, "batch_to_device", batch, dataloader_idx=0),
            training_step=self._step,
            loss_of=self.loss_of,
            optimizer_step=self._optimize,
            lookup_context=self.trainer.precision_plugin.forward_context,
            clip=clip,
        )
        with (
            rehearsal as found,
            SWPipeline(recsys_plan(self.plan, found), session.device, session.world) as pipeline,
            leaving_no_trace(self.trainer, self.trainer.lightning_module, session.device),
            torch.enable_grad(),
        ):
            keeper = _Keeper(self.trainer, session)
            kept = keeper.keep()
            try:
                # Finds what feeds the sharded modules, where that is found by watching.
                pipeline.run_one_serial_iter(batches[0])
                profiler = TaskProfiler(pipeline, batches, keeper, rounds=rounds, iterations=iterations)
                return profiler.profile_many(tasks)
            finally:
                pipeline.abandon()
                keeper.put_back(kept)

    def _check(self) -> None:
        trainer, rows = self.trainer, self.session.sharded.dynamic_rows
        if trainer.fit_loop._should_accumulate():
            raise SetupError(
                "a profile was asked for in the middle of an accumulation, whose gradients it would lose; ask behind an"
                f" optimiser step: every {trainer.accumulate_grad_batches} batches"
            )
        if loss_scaler(trainer.precision_plugin) is not None:
            raise SetupError(
                "a profile was asked for under precision 16-mixed, whose loss scaler decides whether steps are made;"
                " profile with 'bf16-mixed' or 32"
            )
        if rows:
            raise SetupError(
                f"a profile was asked for of dynamic tables ({', '.join(rows)}), whose batches cannot be run again"
                " without leaving their rows in the cache; profile the model with plain tables of these sizes"
            )

    def _step(self, batch: Any) -> Any:
        for optimizer in self.trainer.optimizers:
            optimizer.zero_grad()
        results = self.trainer._results
        if results is not None:
            results.batch = batch
        with self.trainer.precision_plugin.train_step_context():
            return self.trainer.lightning_module.training_step(batch, 0)

    def _optimize(self) -> None:
        for optimizer in self.trainer.optimizers:
            optimizer.step()


class _Keeper:
    """Of the model, its optimisers, and what its step draws random numbers from."""

    def __init__(self, trainer: pl.Trainer, session: RecsysSession) -> None:
        self._model = ModelKeeper(session.sharded, trainer.optimizers)
        self._device = session.device

    def keep(self) -> tuple[Any, Any]:
        return self._model.keep(), get_states(self._device)

    def put_back(self, kept: tuple[Any, Any]) -> None:
        model, generators = kept
        self._model.put_back(model)
        set_states(generators, self._device)
