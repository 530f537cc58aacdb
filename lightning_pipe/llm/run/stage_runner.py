"""Pipeline stages for a training loop of the caller, without Lightning."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipe._compat.torch import tree_map_only
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.engine.ranks.agreement import check_agreement
from lightning_pipe.llm.batches.host_values import HostSourceTracker
from lightning_pipe.llm.model.built_stages import HandBuiltStages
from lightning_pipe.llm.model.compiled_layers import disable_donated_buffers
from lightning_pipe.llm.run.optimizer_checks import check_optimizers_for_sharding
from lightning_pipe.llm.run.options import LLMOptions, flatten_option_fields
from lightning_pipe.llm.run.preparation import BatchInPreparation
from lightning_pipe.llm.run.stage_hooks import BatchResult, StageHooks
from lightning_pipe.llm.run.stage_parts import LLMPipelineComponentsBuilder
from lightning_pipe.llm.schedules.checks import fallback_schedule, splits_backward

__all__ = ["StageHooks", "StageRunner"]


class StageRunner:
    """Trains and evaluates a model in pipeline stages, in a loop of the caller.

    All ranks of the initialized world group make the same calls in the same order. A call may have any number of
    micro-batches of any length; schedules are cached by both. The results equal those of
    :class:`~lightning_pipe.strategies.LLMPipelineStrategy`. If the schedule does not support a number of micro-batches,
    they run under ``gpipe``, ``looped_bfs`` or ``zbv_zero_bubble``, with the same stages, and rank 0 warns once of the
    cost in memory.

    Args:
        hooks: model, loss and inputs; its ``model`` becomes this rank's part of the model.
        schedule: see :class:`~lightning_pipe.strategies.LLMPipelineStrategy`.
        device: device of this rank (default: the accelerator's current device, or else the CPU).
        scaler: loss scaler for float16 autocast (default None).
        options: ``stages_per_rank``, ``parallel``, ``split``, ``batching``, ``activation_checkpoint`` and
            ``compile_layers``, as for the strategy.

    Raises:
        SetupError: no process group is initialized, ranks have different arguments, or the model cannot be trained in
            these stages.
    """

    def __init__(
        self,
        hooks: StageHooks,
        schedule: Any = "1f1b",
        *,
        device: torch.device | str | None = None,
        scaler: torch.amp.GradScaler | None = None,
        **options: Any,
    ) -> None:
        if not dist.is_initialized():
            raise SetupError(
                "no process group is initialized; expected one of all ranks. Call"
                " torch.distributed.init_process_group() in a script that torchrun starts"
            )
        checked = LLMOptions(schedule, None, **options, offload_optimizer=False)
        check_agreement(
            flatten_option_fields("", checked), "runner's configuration", dist.group.WORLD, error_class=SetupError
        )
        sizes = checked.parallel.resolve(dist.get_world_size())
        plan = checked.build_stage_plan(sizes)
        for spec in (plan.spec, fallback_schedule(plan.spec)):
            checked.check_schedule(spec, sizes)
        if splits_backward(plan.spec) is not False:
            # Of compiled layers, and of functions that a model compiles, as FlexAttention.
            weakref.finalize(self, disable_donated_buffers())
        self.device = _current_device() if device is None else torch.device(device)
        maker = LLMPipelineComponentsBuilder.from_settings(
            checked.build_llm_pipeline_settings(plan, sizes), self.device, scaler
        )
        with maker.model_building():
            hooks.model = HandBuiltStages.as_model(hooks.build_model())
        maker.check_module(hooks)
        self._parts = maker.build(hooks, plan, hooks.pretrained_weights())
        self._preparation = replace(self._parts.preparation, num_microbatches=None)
        self._scaler = scaler
        self._optimizers: tuple[Optimizer, ...] = ()
        self._sizes = sizes
        if self._parts.scaling is not None:
            self._parts.scaling.patch_scaler()

    @property
    def model(self) -> nn.Module:
        """The model with only this rank's modules and parameters, under their names in the whole model."""
        return self._parts.split.local_model

    def print_stages(self) -> None:
        """Print what each rank holds (modules, parameters, bytes), on the first rank. Every rank must call this."""
        self._parts.print_stages()

    def forward_backward(self, micro_batches: Iterable[Mapping[str, Any]]) -> BatchResult:
        """Compute the loss of micro-batches, and add their gradients to those since the last optimizer step.

        Under ``torch.no_grad()``, compute the loss only.

        Args:
            micro_batches: micro-batches with the same number of rows, on any device; equal on the ranks of a pipeline.

        Returns:
            Loss and number of tokens, equal on every rank.

        Raises:
            InputError: on every rank, if one fails. The gradients since the last optimizer step are discarded.
        """
        try:
            return self._parts.runs.run(*self._begin_batch_preparation(micro_batches))
        except Exception:
            self.zero_grad()
            raise

    def forward_only(self, micro_batches: Iterable[Mapping[str, Any]]) -> list[Any]:
        """Return the hooks' prediction for each micro-batch, on every rank of the pipeline, without gradients.

        Modules keep their mode: call ``runner.model.eval()`` first to turn off dropout.

        Args:
            micro_batches: see :meth:`forward_backward`, also for the errors.
        """
        predictions: list[Any] = self._parts.runs.predict(*self._begin_batch_preparation(micro_batches))
        return predictions

    def optimizer_step(self, *optimizers: Optimizer, max_norm: float | None = None) -> Tensor | None:
        """Divide the gradients by the number of tokens since the last step, step the optimizers, and clear gradients.

        Args:
            optimizers: optimizers of this rank's parameters, the same number on every rank.
            max_norm: norm of the whole model's gradients to clip to; their norm is then returned (default: None).
        """
        if optimizers != self._optimizers:
            check_optimizers_for_sharding(optimizers, self._sizes)
            self._parts.gradients.check_tied_param_groups(optimizers)
            self._optimizers = optimizers
        scaler = self._scaler or torch.amp.GradScaler(self.device.type, enabled=False)
        self._parts.gradients.finalize_grads()
        self._parts.runs.divide_gradients(list(self.model.parameters()))
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        norm = None if max_norm is None else self._parts.gradients.clip_grad_norm(None, max_norm)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        self.zero_grad()
        return norm

    def zero_grad(self) -> None:
        """Discard the gradients and tokens since the last optimizer step."""
        for parameter in self.model.parameters():
            parameter.grad = None
        self._parts.runs.reset_step_token_count()

    def _begin_batch_preparation(
        self, micro_batches: Iterable[Mapping[str, Any]]
    ) -> tuple[list[Any], BatchInPreparation]:
        # A mapping is refused on every rank, in the preparation.
        inputs = micro_batches if isinstance(micro_batches, Mapping) else list(micro_batches)
        copies = HostSourceTracker()
        with copies:
            batch: Any = tree_map_only(Tensor, lambda tensor: tensor.to(self.device), inputs)
        return batch, self._preparation.begin(batch, copies)


def _current_device() -> torch.device:
    kind = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu" if kind is None else f"{kind.type}:{torch.accelerator.current_device_index()}")
