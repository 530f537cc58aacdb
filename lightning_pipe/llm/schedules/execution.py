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

from lightning_pipe._compat.pipelining import (
    ForwardSchedule,
    Schedule,
    register_overlapped_fb_function,
    release_schedule_tensors,
    run_microbatches,
)
from lightning_pipe._compat.torch import tree_map_only
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.stage_module import PassThroughModule
from lightning_pipe.llm.schedules.checks import splits_backward
from lightning_pipe.llm.schedules.specs import ScheduleSpec, instantiate_schedule, map_stages_to_ranks
from lightning_pipe.llm.schedules.timed_stage import TimedStage, run_overlapped

Stages = Sequence[PipelineStage]


def build_schedule(
    spec: ScheduleSpec,
    stages: Stages,
    num_microbatches: int,
    loss_fn: Callable[..., Tensor],
    *,
    overlap: bool = False,
) -> Schedule:
    """Build a schedule for training, in which gradients are neither scaled nor averaged."""
    schedule = instantiate_schedule(
        spec, stages, num_microbatches, _time_as_part_of_last_forward(stages, loss_fn), overlap=overlap
    )
    if overlap:
        register_overlapped_fb_function(schedule, run_overlapped)
    return schedule


def build_evaluation_schedule(
    spec: ScheduleSpec,
    stages: Stages,
    num_microbatches: int,
    result_of: Callable[..., Any] | None = None,
) -> Schedule:
    """Build a schedule of forwards only, for stages placed as in the training schedule.

    PyTorch's own evaluation runs the training schedule without its backwards: it reallocates buffers at each change
    between the two, keeps every micro-batch's output, and fails for schedules in V order.
    """
    ranks = map_stages_to_ranks(spec.placement, stages[0].group_size, stages[0].num_stages)
    return ForwardSchedule(
        list(stages), num_microbatches, ranks, result_of and _time_as_part_of_last_forward(stages, result_of)
    )


def run_schedule(
    schedule: Schedule,
    arg_mbs: list[tuple[Any, ...]],
    kwarg_mbs: list[dict[str, Any]],
    target_mbs: list[Any] | None,
    *,
    losses: list[Any] | None = None,
) -> None:
    """Run one step over all micro-batches, together with the other ranks of the pipeline."""
    try:
        with ExitStack() as context:
            if isinstance(schedule, ForwardSchedule):
                # Buffers that FSDP allocates under inference mode could not be used for training later.
                context.enter_context(torch.inference_mode(False))
                context.enter_context(torch.no_grad())
            run_microbatches(schedule, arg_mbs, kwarg_mbs, target_mbs, losses)
    except RuntimeError as error:
        # PyTorch's error names the tensors, but wraps the user's exception, which callers expect to catch.
        cause = error.__cause__
        if not (isinstance(cause, Exception) and str(error).lstrip().startswith("Failed to run stage backward")):
            raise
        cause.add_note(str(error).strip())
        raise cause from cause.__cause__
    finally:
        release_schedule_tensors(schedule)
    if losses is not None:
        losses[:] = [tree_map_only(Tensor, Tensor.detach, loss) for loss in losses]


def check_shared_for_split_backward(spec: ScheduleSpec, stages: Mapping[int, nn.Module]) -> None:
    """Refuse shared parameters that PyTorch cannot differentiate in two parts."""
    if not splits_backward(spec):
        return
    for index, module in stages.items():
        if index == 0:
            continue  # its backward is never split
        names: dict[int, str] = {}
        for name, parameter in _iter_stage_parameters(module):
            first_name = names.setdefault(id(parameter), name)
            if first_name != name and parameter.requires_grad:
                raise SetupError(
                    f"{first_name} and {name} of stage {index} are one parameter, and schedule {spec.name} runs"
                    " backwards in two parts, which does not support shared parameters. Use 1f1b or interleaved_1f1b"
                )


def _iter_stage_parameters(module: nn.Module, prefix: str = "") -> Iterable[tuple[str, nn.Parameter]]:
    """All parameters under all their names, except in modules that other stages run."""
    if not isinstance(module, PassThroughModule):
        yield from ((f"{prefix}{name}", value) for name, value in module.named_parameters(recurse=False))
        for name, child in module._modules.items():
            if child is not None:
                yield from _iter_stage_parameters(child, f"{prefix}{name}.")


def _time_as_part_of_last_forward(stages: Stages, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, timed as part of the last stage's forward if the stage records times."""
    last = stages[-1]
    return last.time_as_part_of_forward(function) if isinstance(last, TimedStage) and last.is_last else function
