"""Batches run through the stages, and what came of them, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipe.engine import InputError
from lightning_pipe.llm.dimensions import StageMeshes
from lightning_pipe.llm.gradients import scale_gradients
from lightning_pipe.llm.preparation import BatchPreparation, PreparedBatch, StepInputs
from lightning_pipe.llm.runner import PipelineRunner
from lightning_pipe.strategies.loss_scaling import LossScaling
from lightning_pipe.strategies.pipeline_module import BatchResult, PipelineModule

__all__ = ["BatchRuns"]


class BatchRuns:
    """What :class:`PipelineModule` calls where its model is in stages; every rank makes the same calls.

    Args:
        module: says what a micro-batch's loss and prediction are.
        runner: of this rank's stages.
        preparation: of its batches.
        meshes: of all ranks.
        last_stage_rank: in the pipeline, the rank of the last stage.
        group: of all ranks, on the CPU; used by nothing else that runs beside a batch.
        device: of this rank.
        scaling: of losses in half precision.
    """

    def __init__(
        self,
        module: PipelineModule,
        runner: PipelineRunner,
        preparation: BatchPreparation,
        meshes: StageMeshes,
        last_stage_rank: int,
        group: dist.ProcessGroup,
        device: torch.device,
        scaling: LossScaling | None,
    ) -> None:
        self._module = module
        self._runner = runner
        self._preparation = preparation
        self._meshes = meshes
        self._last_stage_rank = last_stage_rank
        self._group = group
        self._device = device
        self._scaling = scaling
        self._tokens = 0
        # Ranks that share a tensor have the same losses: one of them counts.
        self._counts = meshes.tensor is None or meshes.tensor.get_local_rank() == 0

    def run(self, batch: Any, prepared: PreparedBatch | None) -> BatchResult:
        """The batch's loss on every rank; where gradients are enabled, its gradients too.

        Args:
            batch: a loader's.
            prepared: what was prepared ahead; a batch that the user has made anew since is prepared now.
        """
        step = self._prepare(batch, prepared)
        if torch.is_grad_enabled():
            scale = 1.0 if self._scaling is None else self._scaling.begin(step.tokens)
            losses = self._runner.train(step.micro_batches, self._scaled_loss(scale))
            self._tokens += step.tokens
        else:
            scale = 1.0
            losses = self._runner.evaluate(step.micro_batches, self._module.summed_loss)
        return BatchResult(self._total(losses) / (scale * max(step.tokens, 1)), step.tokens)

    def _scaled_loss(self, scale: float) -> Any:
        summed_loss = self._module.summed_loss
        return summed_loss if scale == 1.0 else lambda output, target: summed_loss(output, target) * scale

    def predict(self, batch: Any, prepared: PreparedBatch | None) -> Any:
        """The module's predictions for the batch, on every rank of the pipeline."""
        step = self._prepare(batch, prepared)
        results = self._runner.evaluate(step.micro_batches, self._module.prediction)
        self._agree_on_failure()
        found: list[Any] = [None, None]
        failure: InputError | None = None
        if self._runner.has_last_stage:
            try:
                found[0] = step.cut.trim(results)
            except InputError as error:
                failure = error
                found[1] = f"{type(failure).__name__}: {failure}"
        pipeline = self._meshes.root["pipeline"].get_group()
        dist.broadcast_object_list(found, group=pipeline, group_src=self._last_stage_rank)
        if found[1] is not None:
            raise InputError(f"a micro-batch's prediction failed: {found[1]}") from failure
        return found[0]

    def divide(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divide gradients, once, by the tokens of all batches since the last time."""
        scale = 1.0 if self._scaling is None else self._scaling.end()
        scale_gradients(parameters, scale / max(self._tokens, 1))
        self._tokens = 0

    def _prepare(self, batch: Any, prepared: PreparedBatch | None) -> StepInputs:
        if prepared is not None and prepared.batch is not batch:
            prepared.work.wait()
            prepared = None
        return self._preparation.finish(prepared or self._preparation.begin(batch))

    def _total(self, losses: Sequence[Tensor]) -> Tensor:
        """The sum of the losses on all ranks' last stages, on every rank."""
        valid = losses and self._counts and self._runner.failure is None
        total = torch.stack(list(losses)).sum().float().cpu() if valid else torch.zeros(())
        return self._agree_on_failure(total)

    def _agree_on_failure(self, total: Tensor | None = None) -> Tensor:
        """Sum up over all ranks.

        Raises:
            InputError: on every rank, where one's stage or result failed; there, what it raised.
        """
        failure = self._runner.failure
        found = torch.stack([torch.zeros(()) if total is None else total, torch.tensor(float(failure is not None))])
        dist.all_reduce(found, group=self._group)
        if found[1]:
            texts: list[Any] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(texts, failure and f"{type(failure).__name__}: {failure}", group=self._group)
            if failure is not None:
                raise failure
            failed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
            raise InputError(f"the batch could not be run. {failed}")
        return found[0].to(self._device)
