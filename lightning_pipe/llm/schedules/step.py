"""Builds schedules over a rank's stages and runs their steps.

PyTorch's ``step`` over a whole batch cuts every tensor among the keywords along dimension 0, including those without a
batch dimension, such as the boundaries of packed documents. This module passes the micro-batches unchanged. It also
releases them afterwards: PyTorch keeps outputs, and the gradients of received tensors, until the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _Action,
    _add_send_recv,
    _add_unshard_reshard,
    _ComputationType,
    _PipelineSchedule,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import _PipelineStageBase

from lightning_pipe._compat.pipelining import forget_output, run_microbatches, run_overlapped
from lightning_pipe._compat.torch import tree_map_only
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.stage_module import PassThrough
from lightning_pipe.llm.schedules.checks import splits_backward
from lightning_pipe.llm.schedules.named import ScheduleSpec, construct_schedule, place_stages, stages_of_rank
from lightning_pipe.llm.schedules.timed_stage import TimedStage, run_in_turns

Stages = Sequence[PipelineStage]


def build_schedule(
    spec: ScheduleSpec,
    stages: Stages,
    num_microbatches: int,
    loss_fn: Callable[..., Tensor],
    *,
    overlap: bool = False,
) -> _PipelineSchedule:
    """Build a schedule for training, in which gradients are neither scaled nor averaged."""
    _check_stages(spec, stages, has_backward=True)
    check_shared_parameters(spec, {stage.stage_index: stage.submod for stage in stages})
    schedule = construct_schedule(spec, stages, num_microbatches, _timed(stages, loss_fn), overlap=overlap)
    if overlap:
        run_overlapped(schedule, run_in_turns)
    return schedule


def build_evaluation(
    spec: ScheduleSpec,
    stages: Stages,
    num_microbatches: int,
    result_of: Callable[..., Any] | None = None,
) -> _PipelineSchedule:
    """Build a schedule of forwards only, for stages placed as in the training schedule.

    PyTorch's own evaluation runs the training schedule without its backwards: it reallocates buffers at each change
    between the two, keeps every micro-batch's output, and fails for schedules in V order.
    """
    _check_stages(spec, stages, has_backward=False)
    return _Evaluation(list(stages), num_microbatches, spec, result_of and _timed(stages, result_of))


def run_schedule(
    schedule: _PipelineSchedule,
    arg_mbs: list[tuple[Any, ...]],
    kwarg_mbs: list[dict[str, Any]],
    target_mbs: list[Any] | None,
    *,
    losses: list[Any] | None = None,
) -> None:
    """Run one step over all micro-batches, together with the other ranks of the pipeline."""
    stages = _stages(schedule)
    if schedule._has_backward and not torch.is_grad_enabled():
        raise SetupError(
            "a schedule for training is run under no_grad or inference_mode. For evaluation use build_evaluation's,"
            " with separate stages"
        )
    try:
        with ExitStack() as context:
            if not schedule._has_backward:
                # Buffers that FSDP allocates under inference mode could not be used for training later.
                context.enter_context(torch.inference_mode(False))
                context.enter_context(torch.no_grad())
            run_microbatches(schedule, stages, arg_mbs, kwarg_mbs, target_mbs, losses)
    except RuntimeError as error:
        # PyTorch's error names the tensors, but wraps the user's exception, which callers expect to catch.
        cause = error.__cause__
        if not (isinstance(cause, Exception) and str(error).lstrip().startswith("Failed to run stage backward")):
            raise
        cause.add_note(str(error).strip())
        raise cause from cause.__cause__
    finally:
        _forget_batch(schedule, stages)
    if losses is not None:
        losses[:] = [tree_map_only(Tensor, Tensor.detach, loss) for loss in losses]


def _stages(schedule: _PipelineSchedule) -> list[_PipelineStageBase]:
    if isinstance(schedule, PipelineScheduleSingle):
        return [schedule._stage]
    assert isinstance(schedule, PipelineScheduleMulti)
    return list(schedule._stages)


def _forget_batch(schedule: _PipelineSchedule, stages: Sequence[_PipelineStageBase]) -> None:
    """Release the tensors that PyTorch would keep until the next step."""
    schedule._internal_losses.clear()
    for stage in stages:
        stage.clear_runtime_states()  # outputs, an evaluation's inputs, gradients of receive buffers
        stage.bwd_cache.clear()  # the first stage's gradients of its inputs, which are unused
        stage.backward_state.clear()
        stage.dw_runner.clear()


def _check_stages(spec: ScheduleSpec, stages: Stages, *, has_backward: bool) -> None:
    rank, pp_size = stages[0].group_rank, stages[0].group_size
    found = tuple(stage.stage_index for stage in stages)
    needed = stages_of_rank(spec, rank, pp_size, len(stages))
    if found != needed or stages[0].num_stages != pp_size * len(stages):
        raise SetupError(
            f"rank {rank} of {pp_size} has stages {found} of {stages[0].num_stages}; schedule {spec.name} needs"
            f" {needed} of {pp_size * len(stages)}, in this order"
        )
    for stage in stages:
        if InferenceMode.needs_dynamic(stage._user_meta, has_backward):
            raise SetupError(
                f"stage {stage.stage_index} is without input_args or output_args. Give both, on the meta device;"
                " otherwise PyTorch runs the first micro-batch an extra time to infer them, and clears FSDP's gradients"
            )


def check_shared_parameters(spec: ScheduleSpec, stages: Mapping[int, nn.Module]) -> None:
    """Refuse shared parameters that PyTorch cannot differentiate in two parts."""
    if not splits_backward(spec):
        return
    for index, module in stages.items():
        if index == 0:
            continue  # its backward is never split
        names: dict[int, str] = {}
        for name, parameter in _used_parameters(module):
            other = names.setdefault(id(parameter), name)
            if other != name and parameter.requires_grad:
                raise SetupError(
                    f"{other} and {name} of stage {index} are one parameter, and schedule {spec.name} runs"
                    " backwards in two parts, which does not support shared parameters. Use 1f1b or interleaved_1f1b"
                )


def _used_parameters(module: nn.Module, prefix: str = "") -> Iterable[tuple[str, nn.Parameter]]:
    """All parameters under all their names, except in modules that other stages run."""
    if not isinstance(module, PassThrough):
        yield from ((f"{prefix}{name}", value) for name, value in module.named_parameters(recurse=False))
        for name, child in module._modules.items():
            if child is not None:
                yield from _used_parameters(child, f"{prefix}{name}.")


def _timed(stages: Stages, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, timed as part of the last stage's forward if the stage records times."""
    last = stages[-1]
    return last.extend_forward(function) if isinstance(last, TimedStage) and last.is_last else function


class _Evaluation(_PipelineScheduleRuntime):
    """Forwards of all micro-batches of one stage, then of the rank's next, as LoopedBFS before its backwards."""

    def __init__(
        self,
        stages: list[PipelineStage],
        num_microbatches: int,
        spec: ScheduleSpec,
        result_of: Callable[..., Any] | None,
    ) -> None:
        super().__init__(stages, num_microbatches, loss_fn=result_of, scale_grads=False)
        self._has_backward = False
        ranks = place_stages(spec.placement, self.pp_group_size, self._num_stages)
        self.stage_index_to_group_rank = ranks
        for stage in stages:
            stage.stage_index_to_group_rank = ranks
        forwards = {
            rank: [
                _Action(index, _ComputationType.FORWARD, microbatch)
                for index in stages_of_rank(spec, rank, self.pp_group_size, len(stages))
                for microbatch in range(num_microbatches)
            ]
            for rank in range(self.pp_group_size)
        }
        self.pipeline_order = {rank: list(actions) for rank, actions in forwards.items()}
        self.pipeline_order_with_comms = _add_send_recv(
            {rank: _add_unshard_reshard(list(actions)) for rank, actions in forwards.items()},
            stage_to_rank=ranks.__getitem__,
            num_stages=self._num_stages,
        )

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: Any = None
    ) -> None:
        super()._maybe_compute_loss(stage, output, target_mbs, mb_index, loss_kwargs)
        if stage.is_last:
            forget_output(stage, mb_index)  # PyTorch frees it in backward, so all outputs would stay until the end
