"""Checks of a schedule before it runs, for cases in which PyTorch would hang or compute wrong gradients silently."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal

from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from lightning_pipe._compat.pipelining import ComputationType, RuntimeSchedule
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.schedules.simulation import Actions, list_compute_actions
from lightning_pipe.llm.schedules.specs import (
    SCHEDULES,
    ScheduleSpec,
    count_stages_per_rank,
    make_stage_placement_error,
    map_action_stages_to_ranks,
    map_stages_to_ranks,
    read_actions,
)

Sharding = Literal["fsdp", "replicate"]


def check_microbatches(
    spec: ScheduleSpec, num_microbatches: int, pp_size: int, stages_per_rank: int | None = None
) -> None:
    """Refuse a number of micro-batches that the schedule cannot train with; evaluation works with any number."""
    num_stages = pp_size * count_stages_per_rank(spec, pp_size, stages_per_rank)
    unsupported = _explain_unsupported_microbatch_count(spec, num_microbatches, pp_size)
    if unsupported is not None:
        raise SetupError(unsupported)
    actions = list_compute_actions(spec, pp_size, num_microbatches, stages_per_rank)
    _check_stage_placement(spec, actions, pp_size, num_stages)
    _check_last_stage_order(spec, actions, num_stages - 1)


def _explain_unsupported_microbatch_count(spec: ScheduleSpec, count: int, pp_size: int) -> str | None:
    """Reason for which a schedule does not run this number of micro-batches; None if it does."""
    name = spec.name
    if spec.path is not None:
        rows = read_actions(spec.path).values()
        expected = 1 + max(a.microbatch_index or 0 for row in rows for b in row for a in b.sub_actions or (b,))
        if count == expected:
            return None
        return f"num_microbatches is {count}; the schedule in {spec.path} is for {expected}. Use {expected}"
    if issubclass(spec.schedule_class, Schedule1F1B) and count < pp_size:
        return (
            f"num_microbatches is {count}; schedule {name} needs at least one for each of the {pp_size} stages. Use"
            f" {pp_size} or more, or schedule gpipe"
        )
    if issubclass(spec.schedule_class, ScheduleDualPipeV) and count < 2 * pp_size:
        return (
            f"num_microbatches is {count}; schedule {name} needs at least one for each of the {2 * pp_size} stages. Use"
            f" {2 * pp_size} or more, or schedule zbv_zero_bubble"
        )
    if issubclass(
        spec.schedule_class, ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble
    ) and not _divides_into_rounds(count, pp_size):
        less = next(m for m in range(count, 0, -1) if _divides_into_rounds(m, pp_size))
        more = next(m for m in range(count, 2 * count + pp_size) if _divides_into_rounds(m, pp_size))
        return (
            f"num_microbatches is {count}; schedule {name} needs a multiple of its rounds, {count // pp_size}, which is"
            f" {count} // {pp_size} ranks. Use {less} or {more}"
        )
    return None


@cache
def choose_supported_schedule(
    spec: ScheduleSpec, num_microbatches: int, pp_size: int, stages_per_rank: int | None = None
) -> ScheduleSpec:
    """Return the schedule if it supports the number of micro-batches, else one for any number with the same stages."""
    if _explain_unsupported_microbatch_count(spec, num_microbatches, pp_size) is not None:
        spec = fallback_schedule(spec)
    check_microbatches(spec, num_microbatches, pp_size, stages_per_rank)
    return spec


def describe_schedule_fallback(spec: ScheduleSpec, num_microbatches: int, pp_size: int) -> str:
    """Reason for which :func:`choose_supported_schedule` replaces a schedule, and the cost in memory."""
    unsupported = _explain_unsupported_microbatch_count(spec, num_microbatches, pp_size)
    assert unsupported is not None
    return (
        f"{unsupported}. Steps with such a number run under {fallback_schedule(spec).name}, with the same results,"
        " but more micro-batches have activations in memory at a time"
    )


def fallback_schedule(spec: ScheduleSpec) -> ScheduleSpec:
    """Schedule that places stages in the same way, and runs any number of micro-batches."""
    name = {"single": "gpipe", "loop": "looped_bfs", "v": "zbv_zero_bubble"}[spec.placement]
    return replace(SCHEDULES[name], options=spec.options)


def _divides_into_rounds(num_microbatches: int, pp_size: int) -> bool:
    return num_microbatches % max(1, num_microbatches // pp_size) == 0


def _check_stage_placement(spec: ScheduleSpec, actions: Actions, pp_size: int, num_stages: int) -> None:
    """Check that a class lists the actions of each rank's own stages, and can run them."""
    subject = f"schedule {spec.name}"
    ranks = map_action_stages_to_ranks(actions, subject) if actions else {}
    if actions and ranks != map_stages_to_ranks(spec.placement, pp_size, num_stages):
        raise make_stage_placement_error(subject, ranks, pp_size)
    sends_to_itself = spec.placement == "v" and not issubclass(spec.schedule_class, RuntimeSchedule)
    if sends_to_itself:
        raise SetupError(
            f"{subject} has neighboring stages on one rank, and derives from PipelineScheduleMulti, which only passes"
            " tensors to other ranks. Derive it from _PipelineScheduleRuntime"
        )


def _check_last_stage_order(spec: ScheduleSpec, actions: Actions, last: int) -> None:
    """Check that the last stage computes in ascending order: PyTorch takes the i-th computed loss for micro-batch i."""
    forward = ComputationType.FORWARD
    row = [a for rank in actions.values() for a in rank if a.stage_index == last and a.computation_type is forward]
    indices = [action.microbatch_index for action in row]
    if indices != sorted(indices, key=lambda index: index or 0):
        raise SetupError(
            f"schedule {spec.name} has the forwards of the last stage, {last}, in the order {indices}; PyTorch would"
            " use the losses of other micro-batches in their backwards. Put them in ascending order"
        )


def check_schedule_sharding(spec: ScheduleSpec, sharding: Sharding | None, *, reshard_after_forward: bool) -> None:
    """Refuse schedules that would compute wrong gradients for stages that several ranks share."""
    if sharding is None:
        return
    if issubclass(spec.schedule_class, PipelineScheduleMulti) and not issubclass(spec.schedule_class, RuntimeSchedule):
        raise SetupError(
            f"schedule {spec.name} derives from PipelineScheduleMulti, which never reduces gradients over the ranks"
            " that share a stage. Derive it from _PipelineScheduleRuntime"
        )
    if sharding == "replicate" or not reshard_after_forward:
        return
    split = splits_backward(spec)
    if split is not False:
        reason = "lists no actions, so it may run" if split is None else "runs"
        raise SetupError(
            f"parallel.reshard_after_forward is true, and schedule {spec.name} {reason} backwards in two parts, which"
            " gives wrong gradients with it. Disable it: set reshard_after_forward to false, or use 1f1b or"
            " interleaved_1f1b"
        )


def splits_backward(spec: ScheduleSpec) -> bool | None:
    """Return True if backwards run in two parts, for inputs and for weights; None if the schedule lists no actions."""
    if spec.path is not None:
        actions: Actions = read_actions(spec.path)
    else:
        try:
            actions = list_compute_actions(spec, 2, 4)  # the smallest case that all of PyTorch's schedules support
        except SetupError:
            return None
    parts = (ComputationType.BACKWARD_INPUT, ComputationType.BACKWARD_WEIGHT)
    return any(action.computation_type in parts for row in actions.values() for action in row) if actions else None
