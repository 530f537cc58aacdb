"""Profiles of the recsys tasks during training under a Trainer, which leave the module unchanged."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torchmetrics import Metric

from lightning_pipe._compat.fast_hooks import call_strategy_hook
from lightning_pipe._compat.lightning import discard_logged_values, is_accumulating
from lightning_pipe.engine import PipelinePlan, PipelineTask, ProfileResult, SetupError, SWPipeline, TaskProfiler
from lightning_pipe.engine.runtime.captured import Snapshot, take_snapshot
from lightning_pipe.loops.data.random_streams import get_rng_states, set_rng_states
from lightning_pipe.loops.programs.batch_hooks import find_user_transfer_hooks
from lightning_pipe.recsys.plans.recsys_plans import divides_lookups, recsys_plan, with_transfer_on_main
from lightning_pipe.recsys.tasks.actions import make_clip_function
from lightning_pipe.recsys.tasks.model_snapshot import ModelSnapshotter
from lightning_pipe.recsys.tasks.session import RecsysSession
from lightning_pipe.recsys.tasks.step_predictions import compute_step_sizes, predict_step_times
from lightning_pipe.strategies.setup_checks import get_grad_scaler


@dataclass(frozen=True)
class RecsysProfiler:
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
        clip = make_clip_function(session.sharded_model, float(clip_value)) if clip_value else None
        profiling_tasks = session.profiling_tasks(
            "training_step",
            self.plan,
            clipped=clip is not None,
            transfer=self._transfer_batch,
            training_step=self._step,
            loss_of=self.loss_of,
            optimizer_step=self._step_optimizers,
            lookup_context=self.trainer.precision_plugin.forward_context,
            clip=clip,
        )

        def make_plan(tasks: Sequence[PipelineTask]) -> PipelinePlan:
            plan = recsys_plan(self.plan, tasks)
            # Lightning's calls of the user's hooks belong to the main thread.
            return with_transfer_on_main(plan) if find_user_transfer_hooks(self.trainer) else plan

        with (
            ExitStack() as rows,
            profiling_tasks as profiled_tasks,
            SWPipeline(make_plan(profiled_tasks), session.device, session.world) as pipeline,
            discard_logged_values(self.trainer, self.trainer.lightning_module),
            _metrics_and_generators_kept(self.trainer.lightning_module, session.device),
            torch.enable_grad(),
        ):
            for table_rows in session.sharded_model.dynamic_rows.values():
                rows.enter_context(table_rows.repeated_training())
            keeper = _TrainingStateSnapshotter(self.trainer, session)
            state = keeper.snapshot()
            try:
                # With the rewrite method "record", this iteration finds the inputs of the sharded modules.
                pipeline.run_one_serial_iter(batches[0])
                profiler = TaskProfiler(pipeline, batches, keeper, rounds=rounds, iterations=iterations)
                profile = profiler.profile_many(tasks)
                predicted = self._predict_step_times(pipeline, batches, iterations)
                return replace(profile, predicted=predicted)
            finally:
                pipeline.abandon()
                keeper.restore(state)

    def _predict_step_times(
        self, pipeline: SWPipeline, batches: Sequence[Any], iterations: int
    ) -> dict[str, dict[str, float]]:
        """Run serial iterations, whose waits are not hidden, and simulate plans with their times.

        Nothing is predicted from lookups in two parts: the rows that wait differ from batch to batch.
        """
        session = self.session
        if divides_lookups(pipeline.plan):
            return {}
        pipeline.drain()
        pipeline.start_trace()
        for index in range(iterations):
            pipeline.run_one_serial_iter(take_snapshot(batches[index % len(batches)]).copy_captured_value())
        times: dict[str, list[float]] = {}
        for span in pipeline.stop_trace():
            times.setdefault(span.task, []).append(span.end - span.start)
        return predict_step_times(
            pipeline.plan,
            {name: statistics.median(times[name]) for name in pipeline.plan.tasks},
            compute_step_sizes(session.sharded_model, batches[0]),
            ranks=self.trainer.world_size,
            device=session.device,
            on_disk=bool(session.sharded_model.dynamic_rows),
        )

    def _check(self) -> None:
        trainer = self.trainer
        if is_accumulating(trainer.fit_loop.epoch_loop):
            raise SetupError(
                "a profile was requested in the middle of an accumulation, whose gradients it would lose. Profile after"
                f" an optimizer step: every {trainer.accumulate_grad_batches} batches"
            )
        if get_grad_scaler(trainer.precision_plugin) is not None:
            raise SetupError(
                "a profile was requested under precision '16-mixed', whose loss scaler may skip steps. Profile with"
                " 'bf16-mixed' or '32-true'"
            )
        if self.session.sharded_model.id_maps:
            raise SetupError(
                "a profile was requested of a model with managed collision, but replayed batches would evict rows."
                " Profile the model with ordinary tables of the same size"
            )

    def _transfer_batch(self, batch: Any) -> Any:
        if find_user_transfer_hooks(self.trainer):
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

    def _step_optimizers(self) -> None:
        for optimizer in self.trainer.optimizers:
            optimizer.step()


class _TrainingStateSnapshotter:
    """Snapshots of the model, its optimizers and the random generators that its step uses."""

    def __init__(self, trainer: pl.Trainer, session: RecsysSession) -> None:
        self._model = ModelSnapshotter(session.sharded_model, trainer.optimizers)
        self._device = session.device

    def snapshot(self) -> tuple[Any, Any]:
        return self._model.snapshot(), get_rng_states(self._device)

    def restore(self, state: tuple[Any, Any]) -> None:
        model, generators = state
        self._model.restore(model)
        set_rng_states(generators, self._device)


@contextmanager
def _metrics_and_generators_kept(module: pl.LightningModule, device: torch.device) -> Iterator[None]:
    """Context after which the states of the module's metrics and of the random generators are restored."""
    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    states, generators = [_snapshot_metric_state(metric) for metric in metrics], get_rng_states(device)
    try:
        yield
    finally:
        for metric, state in zip(metrics, states, strict=True):
            metric.__dict__.update(state.copy_captured_value())
        set_rng_states(generators, device)


def _snapshot_metric_state(metric: Metric) -> Snapshot:
    names = (*metric._defaults, "_update_count", "_computed", "_forward_cache")
    return take_snapshot({name: getattr(metric, name) for name in names})
