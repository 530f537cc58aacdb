"""Profiles of the recsys tasks under a Trainer: of the module as it trains, which is not trained by them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer import call
from torch.optim import Optimizer

from lightning_pipe.engine import PipelinePlan, ProfileResult, SetupError, SWPipeline, TaskProfiler
from lightning_pipe.loops.data.random_streams import get_states, set_states
from lightning_pipe.recsys.plans.named import recsys_plan
from lightning_pipe.recsys.tasks.keeper import ModelKeeper
from lightning_pipe.recsys.tasks.session import RecsysSession
from lightning_pipe.recsys.tasks.train_pipeline_checks import clipping
from lightning_pipe.strategies.recommender.untrained import leaving_no_trace
from lightning_pipe.strategies.refusals import loss_scaler

__all__ = ["Profiled", "profile_tables"]


@dataclass(frozen=True)
class Profiled:
    """What a profile is of.

    Args:
        trainer: the trainer; between two batches, and not in the middle of an accumulation.
        session: session of its module, whose training is set aside.
        loss_of: gives the loss in what the module's step returned.
        plan: plan that is measured.
    """

    trainer: pl.Trainer
    session: RecsysSession
    loss_of: Callable[[Any], torch.Tensor | None]
    plan: PipelinePlan


def profile_tables(
    of: Profiled, batches: Sequence[Any], tasks: Sequence[str] | None, rounds: int, iterations: int
) -> ProfileResult:
    """Profile tasks; every rank calls this at the same point.

    Args:
        of: what.
        batches: on the host, as loaders give them.
        tasks: by name; all by default.
        rounds: how often each is measured.
        iterations: of each measurement.

    Raises:
        SetupError: gradients of some batches are accumulated, losses are scaled, or tables have no size.
    """
    _check(of)
    clip_value, device = of.trainer.gradient_clip_val, of.session.device
    clip = clipping(of.session.sharded, float(clip_value)) if clip_value else None
    rehearsal = of.session.rehearsal(
        "training_step",
        of.plan,
        clipped=clip is not None,
        transfer=partial(_transfer, of.trainer),
        training_step=partial(_step, of),
        loss_of=of.loss_of,
        optimizer_step=partial(_optimize, of.trainer.optimizers),
        lookup_context=of.trainer.precision_plugin.forward_context,
        clip=clip,
    )
    with (
        rehearsal as found,
        SWPipeline(recsys_plan(of.plan, found), device, of.session.world) as pipeline,
        leaving_no_trace(of.trainer, of.trainer.lightning_module, device),
        torch.enable_grad(),
    ):
        keeper = _Keeper(of)
        kept = keeper.keep()
        try:
            # Finds what feeds the sharded modules, where that is found by watching.
            pipeline.run_one_serial_iter(batches[0])
            profiler = TaskProfiler(pipeline, batches, keeper, rounds=rounds, iterations=iterations)
            return profiler.profile_many(tasks)
        finally:
            pipeline.abandon()
            keeper.put_back(kept)


class _Keeper:
    """Of the model, its optimisers, and what its step draws random numbers from."""

    def __init__(self, of: Profiled) -> None:
        self._model = ModelKeeper(of.session.sharded, of.trainer.optimizers)
        self._device = of.session.device

    def keep(self) -> tuple[Any, Any]:
        return self._model.keep(), get_states(self._device)

    def put_back(self, kept: tuple[Any, Any]) -> None:
        model, generators = kept
        self._model.put_back(model)
        set_states(generators, self._device)


def _check(of: Profiled) -> None:
    if of.trainer.fit_loop._should_accumulate():
        raise SetupError(
            "a profile was asked for in the middle of an accumulation, whose gradients it would lose; ask behind an"
            f" optimiser step: every {of.trainer.accumulate_grad_batches} batches"
        )
    if loss_scaler(of.trainer.precision_plugin) is not None:
        raise SetupError(
            "a profile was asked for under precision 16-mixed, whose loss scaler decides whether steps are made;"
            " profile with 'bf16-mixed' or 32"
        )
    if rows := of.session.sharded.dynamic_rows:
        raise SetupError(
            f"a profile was asked for of dynamic tables ({', '.join(rows)}), whose batches cannot be run again"
            " without leaving their rows in the cache; profile the model with plain tables of these sizes"
        )


def _transfer(trainer: pl.Trainer, batch: Any) -> Any:
    return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)


def _step(of: Profiled, batch: Any) -> Any:
    for optimizer in of.trainer.optimizers:
        optimizer.zero_grad()
    results = of.trainer._results
    if results is not None:
        results.batch = batch
    with of.trainer.precision_plugin.train_step_context():
        return of.trainer.lightning_module.training_step(batch, 0)


def _optimize(optimizers: Sequence[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
