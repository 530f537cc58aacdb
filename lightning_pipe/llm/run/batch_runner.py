"""Runs of batches through the stages, with losses and predictions on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipe._compat.torch import tree_flatten, tree_map, tree_unflatten
from lightning_pipe.engine import InputError
from lightning_pipe.engine.ranks.loss_check import check_finite_loss
from lightning_pipe.engine.ranks.object_collectives import raise_gathered, run_on_rank
from lightning_pipe.llm.losses.cross_entropy import check_loss_is_sum
from lightning_pipe.llm.losses.router_losses import RouterLosses, sum_router_losses
from lightning_pipe.llm.parallel.gradients import scale_gradients
from lightning_pipe.llm.parallel.parallel_dims import ParallelMeshes
from lightning_pipe.llm.run.loss_scaling import LossScaling
from lightning_pipe.llm.run.preparation import BatchInPreparation, BatchPreparation, StepInputs
from lightning_pipe.llm.run.schedule_runner import ScheduleRunner, StageInputs
from lightning_pipe.llm.run.stage_hooks import BatchResult, RouterLossMeans, StageHooks

T = TypeVar("T")

# Number of sums over ranks: the loss and three router losses.
_SUMS = 4


@dataclass(eq=False)
class BatchRunner:
    """Runs batches for a module whose model is in stages. Every rank must make the same calls."""

    module: StageHooks
    runner: ScheduleRunner
    preparation: BatchPreparation
    meshes: ParallelMeshes
    last_stage_rank: int
    group: dist.ProcessGroup
    device: torch.device
    scaling: LossScaling | None
    has_routers: bool
    detect_nan: bool

    def __post_init__(self) -> None:
        self._tokens = 0
        self._sum_seen = False
        self._context = self.preparation.context
        # The ranks of a tensor-parallel group have the same losses, so only one of them is counted.
        self._counts = self.meshes.tensor is None or self.meshes.tensor.get_local_rank() == 0

    def reset_step_token_count(self) -> None:
        """Discard the tokens of an unfinished step, since an epoch or a training may have ended within a step."""
        self._tokens = 0
        if self.scaling is not None:
            self.scaling.pop_gradient_factor()

    def run(self, batch: Any, prepared: BatchInPreparation | None) -> BatchResult:
        """Compute the loss of a batch on every rank, and its gradients if gradients are enabled."""
        step = self._prepare(batch, prepared)
        train = torch.is_grad_enabled()
        scale = self.scaling.get_step_loss_scale(step.tokens) if train and self.scaling is not None else 1.0
        micro_batches, routers = (
            self._add_router_loss_contexts(step, scale) if self.has_routers else (step.micro_batches, [])
        )
        if train:
            losses = self.runner.train(micro_batches, self._make_scaled_loss_fn(scale))
            self._tokens += step.tokens
        else:
            losses = self.runner.evaluate(micro_batches, self.module.summed_loss)
        total, *router_sums = self._all_reduce_loss_sums(losses, routers)
        if train and self.detect_nan and not total.isfinite():  # the same on all ranks
            check_finite_loss(torch.stack(losses) / scale if losses else None, self.group)
        loss = total.float().to(self.device, non_blocking=True) / (scale * max(step.tokens, 1))
        return BatchResult(loss, step.tokens, RouterLossMeans.from_sums(torch.stack(router_sums)))

    def _add_router_loss_contexts(self, step: StepInputs, scale: float) -> tuple[list[StageInputs], list[RouterLosses]]:
        """Add router losses to the micro-batches, weighted by their tokens and scaled like the main loss."""
        remaining_rows, routers = step.cut.rows, []
        tokens = self.preparation.count_local_loss_tokens(step)
        for micro_batch, item, length, count in zip(
            step.micro_batches, step.cut.items, step.lengths, tokens, strict=True
        ):
            counted = self._build_router_token_mask(micro_batch.target, remaining_rows, length)
            routers.append(RouterLosses(count, token_mask=counted, scale=scale))
            remaining_rows -= self.preparation.padding_spec.get_microbatch_rows_and_length(item)[0]
        micro_batches = [
            replace(micro_batch, contexts=(*micro_batch.contexts, partial(_identity, losses)))
            for micro_batch, losses in zip(step.micro_batches, routers, strict=True)
        ]
        return micro_batches, routers

    def _build_router_token_mask(self, micro_batch: Any, rows: int, length: int) -> Tensor | None:
        """Tokens over which routers are balanced: the module's, or all, without added rows and padding."""
        counted = self.module.router_token_mask(micro_batch)
        tokens = micro_batch.get("input_ids") if counted is None else counted
        if not isinstance(tokens, Tensor) or tokens.ndim < 2 or (len(tokens) <= rows and tokens.shape[1] <= length):
            return counted
        row, position = (torch.arange(size, device=tokens.device) for size in tokens.shape[:2])
        real = (row[:, None] < rows) & (position < length)
        return real if counted is None else real & counted

    def _make_scaled_loss_fn(self, scale: float) -> Any:
        summed_loss = self.module.summed_loss if self._sum_seen else self._compute_loss_and_check_sum
        return summed_loss if scale == 1.0 else lambda output, target: summed_loss(output, target) * scale

    def _compute_loss_and_check_sum(self, output: Any, target: Any) -> Tensor:
        """Compute the module's loss, and check on the first call that it is a sum."""
        loss = self.module.summed_loss(output, target)
        if not self._sum_seen:
            self._sum_seen = True
            check_loss_is_sum(self.module.summed_loss, loss, output, target)
        return loss

    def predict(self, batch: Any, prepared: BatchInPreparation | None) -> Any:
        """Return the module's predictions for the batch, on every rank of the pipeline."""
        step = self._prepare(batch, prepared)
        unpadded = zip(step.cut.items, step.lengths, strict=True)  # results come in the order of micro-batches

        def prediction(output: Any, padded: Any) -> Any:
            micro_batch, length = next(unpadded)
            leaves, structure = tree_flatten(output)
            per_token = [isinstance(leaf, Tensor) and leaf.ndim > 2 and leaf.shape[1] == step.length for leaf in leaves]
            if not any(per_token) or self._context is not None:
                return self.module.prediction(output, padded)
            cut = [leaf[:, :length] if is_cut else leaf for leaf, is_cut in zip(leaves, per_token, strict=True)]
            return self.module.prediction(tree_unflatten(cut, structure), micro_batch)

        results = self.runner.evaluate(step.micro_batches, prediction)
        self._agree_on_failure(torch.zeros(0, dtype=torch.float64))

        def join_predictions() -> Any:
            parts = results
            if self._context is not None:
                # A failure on any rank has raised on all ranks, so all ranks that share the sequences join them here.
                parts = [
                    tree_map(
                        lambda part, length=length: (
                            None if part is None else self._gather_context_chunks(part, step.length)[:, :length]
                        ),
                        result,
                    )
                    for result, length in zip(results, step.lengths, strict=True)
                ]
            # A list of micro-batches, which may differ in length, gives a list, without micro-batches added as fill.
            return list(parts)[: len(batch)] if isinstance(batch, (list, tuple)) else step.cut.merge_outputs(parts)

        pipeline = self.meshes.root["pipeline"].get_group()
        failed = "a micro-batch's prediction failed"
        return run_on_rank(join_predictions, failed, pipeline, self.last_stage_rank, InputError)

    def run_uncounted(self, batch: Any, *, with_losses: bool) -> None:
        """Run another pipeline's batch without counting its tokens and losses."""
        step = self.preparation.finish(self.preparation.begin(batch, counts=False))
        self.runner.evaluate(step.micro_batches, lambda output, target: output)
        self._agree_on_failure(torch.zeros(_SUMS if with_losses else 0, dtype=torch.float64))

    def _gather_context_chunks(self, result: Any, length: int) -> Tensor:
        """Join the chunks of all context ranks, which must have tokens in dimension 1."""
        assert self._context is not None
        shape = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        if not isinstance(result, Tensor) or result.ndim < 2 or result.shape[1] * self._context.size != length:
            raise InputError(
                f"The prediction of a micro-batch must have the shape (rows, tokens, ...), got {shape}, because with"
                f" parallel.cp={self._context.size} it is joined along the tokens. Return such a tensor in prediction."
            )
        return self._context.gather(result)

    def divide_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Divide gradients by the number of tokens in all batches since the last call."""
        scale = 1.0 if self.scaling is None else self.scaling.pop_gradient_factor()
        scale_gradients(parameters, scale / max(self._tokens, 1))
        self._tokens = 0

    def _prepare(self, batch: Any, prepared: BatchInPreparation | None) -> StepInputs:
        if prepared is not None and not prepared.matches(batch):
            prepared.work.wait()
            prepared = None
        return self.preparation.finish(prepared or self.preparation.begin(batch))

    def _all_reduce_loss_sums(self, losses: Sequence[Tensor], routers: Sequence[RouterLosses]) -> Tensor:
        """Return the sums of the losses and of the router losses of all ranks, on every rank."""
        totals = torch.zeros(_SUMS, dtype=torch.float64)
        if self._counts and self.runner.failure is None:
            if losses:
                totals[0] = torch.stack(list(losses)).sum().float()
            totals[1:] = sum_router_losses(routers)
        return self._agree_on_failure(totals)

    def _agree_on_failure(self, totals: Tensor) -> Tensor:
        """Sum *totals* over all ranks, and raise on all ranks if one failed."""
        failure = self.runner.failure
        sums = torch.cat([totals, totals.new_tensor([float(failure is not None)])])
        dist.all_reduce(sums, group=self.group)
        if sums[-1]:
            raise_gathered(failure, "the batch could not be run", self.group, InputError)
        return sums[:-1]


def _identity(context: T) -> T:
    """Return the argument, as a context factory for each stage of a rank: all stages enter the same context."""
    return context
