"""Profiles of the recsys tasks during training under a Trainer, which leave the module unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torchmetrics import Metric

from lightning_pipe._compat.lightning import accumulates, logged_values_discarded
from lightning_pipe._compat.quick_lightning import call_strategy_hook
from lightning_pipe.engine import PipelinePlan, PipelineTask, ProfileResult, SetupError, SWPipeline, TaskProfiler
from lightning_pipe.engine.runtime.captured import Captured, capture
from lightning_pipe.loops.data.random_streams import get_states, set_states
from lightning_pipe.loops.programs.batch_hooks import users_transfers
from lightning_pipe.recsys.plans.named import recsys_plan, with_transfer_on_main
from lightning_pipe.recsys.tasks.actions import clipping
from lightning_pipe.recsys.tasks.kept_model import ModelKeeper
from lightning_pipe.recsys.tasks.session import RecsysSession
from lightning_pipe.strategies.refusals import loss_scaler


@dataclass(frozen=True)
class TableProfile:
    """Profiler of a training, for use between two batches and outside of gradient accumulation."""

    trainer: pl.Trainer
    session: RecsysSession
    loss_of: Callable[[Any], torch.Tensor | None]
    plan: PipelinePlan

    def measure(
        self, batches: Sequence[Any], tasks: Sequence[str] | None, rounds: int, iterations: int
    ) -> ProfileResult:
        """Measure tasks. Every rank calls this method at the same point."""
        self._check()
        clip_value, session = self.trainer.gradient_clip_val, self.session
        clip = clipping(session.sharded, float(clip_value)) if clip_value else None
        rehearsal = session.rehearsal(
            "training_step",
            self.plan,
            clipped=clip is not None,
            transfer=self._move,
            training_step=self._step,
            loss_of=self.loss_of,
            optimizer_step=self._optimize,
            lookup_context=self.trainer.precision_plugin.forward_context,
            clip=clip,
        )

        def plan_of(tasks: Sequence[PipelineTask]) -> PipelinePlan:
            plan = recsys_plan(self.plan, tasks)
            # Lightning's calls of the user's hooks belong to the main thread.
            return with_transfer_on_main(plan) if users_transfers(self.trainer) else plan

        with (
            ExitStack() as rows,
            rehearsal as rehearsed_tasks,
            SWPipeline(plan_of(rehearsed_tasks), session.device, session.world) as pipeline,
            logged_values_discarded(self.trainer, self.trainer.lightning_module),
            _metrics_and_generators_kept(self.trainer.lightning_module, session.device),
            torch.enable_grad(),
        ):
            for table_rows in session.sharded.dynamic_rows.values():
                rows.enter_context(table_rows.rehearsal())
            keeper = _Keeper(self.trainer, session)
            state = keeper.snapshot()
            try:
                # With the rewrite method "record", this iteration finds the inputs of the sharded modules.
                pipeline.run_one_serial_iter(batches[0])
                profiler = TaskProfiler(pipeline, batches, keeper, rounds=rounds, iterations=iterations)
                return profiler.profile_many(tasks)
            finally:
                pipeline.abandon()
                keeper.restore(state)

    def _check(self) -> None:
        trainer = self.trainer
        if accumulates(trainer.fit_loop.epoch_loop):
            raise SetupError(
                "a profile was requested in the middle of an accumulation, whose gradients it would lose. Profile after"
                f" an optimizer step: every {trainer.accumulate_grad_batches} batches"
            )
        if loss_scaler(trainer.precision_plugin) is not None:
            raise SetupError(
                "a profile was requested under precision '16-mixed', whose loss scaler may skip steps. Profile with"
                " 'bf16-mixed' or '32-true'"
            )
        if self.session.sharded.id_maps:
            raise SetupError(
                "a profile was requested of a model with managed collision, but replayed batches would evict rows."
                " Profile the model with ordinary tables of the same size"
            )

    def _move(self, batch: Any) -> Any:
        if users_transfers(self.trainer):
            return call_strategy_hook(self.trainer, "batch_to_device", batch, dataloader_idx=0)
        return move_data_to_device(batch, self.session.device)

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
    """Snapshots of the model, its optimizers and the random generators that its step uses."""

    def __init__(self, trainer: pl.Trainer, session: RecsysSession) -> None:
        self._model = ModelKeeper(session.sharded, trainer.optimizers)
        self._device = session.device

    def snapshot(self) -> tuple[Any, Any]:
        return self._model.snapshot(), get_states(self._device)

    def restore(self, state: tuple[Any, Any]) -> None:
        model, generators = state
        self._model.restore(model)
        set_states(generators, self._device)


@contextmanager
def _metrics_and_generators_kept(module: pl.LightningModule, device: torch.device) -> Iterator[None]:
    """Context after which the states of the module's metrics and of the random generators are restored."""
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    states, generators = [_state_of(metric) for metric in metrics], get_states(device)
    try:
        yield
    finally:
        for metric, state in zip(metrics, states, strict=True):
            metric.__dict__.update(state.give())
        set_states(generators, device)


def _state_of(metric: Metric) -> Captured:
    names = (*metric._defaults, "_update_count", "_computed", "_forward_cache")
    return capture({name: getattr(metric, name) for name in names})
