"""Checks of a schedule before it runs, for cases in which PyTorch would hang or compute wrong gradients silently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal

import torch._functorch.config
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.schedules.named import (
    SCHEDULES,
    ScheduleSpec,
    count_stages,
    place_stages,
    ranks_of_stages,
    read_actions,
    wrong_places,
)
from lightning_pipe.llm.schedules.simulation import KINDS, Actions, actions_of, simulate

Sharding = Literal["fsdp", "replicate", "ddp"]


def check_microbatches(
    spec: ScheduleSpec, num_microbatches: int, pp_size: int, stages_per_rank: int | None = None
) -> None:
    """Refuse a number of micro-batches that the schedule cannot train with; evaluation works with any number."""
    if num_microbatches < 1:
        raise SetupError(f"num_microbatches must be at least 1, got {num_microbatches}")
    num_stages = pp_size * count_stages(spec, pp_size, stages_per_rank)
    unsupported = _unsupported_number(spec, num_microbatches, pp_size)
    if unsupported is not None:
        raise SetupError(unsupported[0])
    if spec.path is not None:
        _check_file(spec.path, spec, pp_size, num_stages)
    actions = actions_of(spec, pp_size, num_microbatches, stages_per_rank)
    _check_places(spec, actions, pp_size, num_stages)
    _check_last_stage(spec, actions, num_stages - 1)


def _unsupported_number(spec: ScheduleSpec, count: int, pp_size: int) -> tuple[str, int] | None:
    """Reason for which a schedule does not run this number of micro-batches, and a number that it runs; else None."""
    name = spec.name
    if spec.path is not None:
        rows = read_actions(spec.path).values()
        of_file = 1 + max(a.microbatch_index or 0 for row in rows for b in row for a in b.sub_actions or (b,))
        if count == of_file:
            return None
        return f"num_microbatches is {count}; the schedule in {spec.path} is for {of_file}. Use {of_file}", of_file
    if issubclass(spec.schedule_class, Schedule1F1B) and count < pp_size:
        return (
            f"num_microbatches is {count}; schedule {name} needs at least one for each of the {pp_size} stages. Use"
            f" {pp_size} or more, or schedule gpipe"
        ), pp_size
    if issubclass(spec.schedule_class, ScheduleDualPipeV) and count < 2 * pp_size:
        return (
            f"num_microbatches is {count}; schedule {name} needs at least one for each of the {2 * pp_size} stages. Use"
            f" {2 * pp_size} or more, or schedule zbv_zero_bubble"
        ), 2 * pp_size
    if issubclass(spec.schedule_class, ScheduleInterleaved1F1B | ScheduleInterleavedZeroBubble) and not _in_rounds(
        count, pp_size
    ):
        less = next(m for m in range(count, 0, -1) if _in_rounds(m, pp_size))
        more = next(m for m in range(count, 2 * count + pp_size) if _in_rounds(m, pp_size))
        return (
            f"num_microbatches is {count}; schedule {name} needs a multiple of its rounds, {count // pp_size}, which is"
            f" {count} // {pp_size} ranks. Use {less} or {more}"
        ), less
    return None


@cache
def fitting_schedule(
    spec: ScheduleSpec, num_microbatches: int, pp_size: int, stages_per_rank: int | None = None
) -> ScheduleSpec:
    """Return the schedule if it supports the number of micro-batches, else one for any number with the same stages."""
    if _unsupported_number(spec, num_microbatches, pp_size) is not None:
        spec = schedule_of_any_number(spec)
    check_microbatches(spec, num_microbatches, pp_size, stages_per_rank)
    return spec


def describe_replacement(
    spec: ScheduleSpec, num_microbatches: int, pp_size: int, stages_per_rank: int | None = None
) -> str:
    """Reason for which :func:`fitting_schedule` replaces a schedule, and the cost in memory."""
    unsupported = _unsupported_number(spec, num_microbatches, pp_size)
    assert unsupported is not None
    reason, supported = unsupported
    other = schedule_of_any_number(spec)
    live = [_live_microbatches(other, num_microbatches, pp_size, stages_per_rank)]
    live.append(_live_microbatches(spec, supported, pp_size, stages_per_rank))
    return (
        f"{reason}. Steps with such a number run under {other.name}, with the same results. In this step the ranks hold"
        f" the activations of up to {live[0]} micro-batches at a time, counted once for each stage; under {spec.name}"
        f" with {supported} micro-batches they hold {live[1]}"
    )


def _live_microbatches(spec: ScheduleSpec, count: int, pp_size: int, stages_per_rank: int | None) -> list[int]:
    """Maximum number of micro-batches whose activations each rank holds."""
    actions = actions_of(spec, pp_size, count, stages_per_rank)
    stages = {action.stage_index for row in actions.values() for action in row}
    timeline = simulate(actions, dict.fromkeys(product(stages, KINDS.values()), 1.0))
    return [timeline.peak_live(rank) for rank in sorted(actions)]


def schedule_of_any_number(spec: ScheduleSpec) -> ScheduleSpec:
    """Schedule that places stages in the same way, and runs any number of micro-batches."""
    return SCHEDULES[{"single": "gpipe", "loop": "looped_bfs", "v": "zbv_zero_bubble"}[spec.placement]]


def _in_rounds(num_microbatches: int, pp_size: int) -> bool:
    return num_microbatches % max(1, num_microbatches // pp_size) == 0


def _check_places(spec: ScheduleSpec, actions: Actions, pp_size: int, num_stages: int) -> None:
    """Check that a class lists the actions of each rank's own stages, and can run them."""
    what = f"schedule {spec.name}"
    ranks = ranks_of_stages(actions, what) if actions else {}
    if actions and ranks != place_stages(spec.placement, pp_size, num_stages):
        raise wrong_places(what, ranks, pp_size)
    sends_to_itself = spec.placement == "v" and not issubclass(spec.schedule_class, _PipelineScheduleRuntime)
    if sends_to_itself:
        raise SetupError(
            f"{what} has neighbouring stages on one rank, and derives from PipelineScheduleMulti, which only passes"
            " tensors to other ranks. Derive it from _PipelineScheduleRuntime"
        )


def _check_last_stage(spec: ScheduleSpec, actions: Actions, last: int) -> None:
    """Check that the last stage computes in ascending order: PyTorch takes the i-th computed loss for micro-batch i."""
    forward = _ComputationType.FORWARD
    row = [a for rank in actions.values() for a in rank if a.stage_index == last and a.computation_type is forward]
    found = [action.microbatch_index for action in row]
    if found != sorted(found, key=lambda index: index or 0):
        raise SetupError(
            f"schedule {spec.name} has the forwards of the last stage, {last}, in the order {found}; PyTorch would use"
            " the losses of other micro-batches in their backwards. Put them in ascending order"
        )


def _check_file(path: Path, spec: ScheduleSpec, pp_size: int, num_stages: int) -> None:
    actions = read_actions(path)
    if any(not action.is_compute_op for row in actions.values() for action in row):
        _check_messages(path, actions, place_stages(spec.placement, pp_size, num_stages))


# For each receive: the neighbour's send, the offset of the neighbour's stage, and the computations that need it.
_RECEIVED = {
    _ComputationType.RECV_F: (_ComputationType.SEND_F, -1, (_ComputationType.FORWARD,)),
    _ComputationType.RECV_B: (
        _ComputationType.SEND_B,
        1,
        (_ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_INPUT),
    ),
}
_COMPUTED = {
    _ComputationType.SEND_F: (_ComputationType.FORWARD,),
    _ComputationType.SEND_B: (_ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_INPUT),
}


def _check_messages(path: Path, actions: Actions, ranks: Mapping[int, int]) -> None:
    """Check a file with communication: messages between two ranks match by order only, so orders must agree."""
    sent: dict[tuple[int, int], list[str]] = {}
    expected: dict[tuple[int, int], list[str]] = {}
    for rank, row in actions.items():
        done: set[tuple[int, _ComputationType, int | None]] = set()
        for action in (one for each in row for one in each.sub_actions or (each,)):
            stage, kind, microbatch = action.stage_index, action.computation_type, action.microbatch_index
            if kind in _RECEIVED:
                send, step, _ = _RECEIVED[kind]
                _note(expected, (ranks.get(stage + step, rank), rank), _Action(stage + step, send, microbatch))
            elif kind in _COMPUTED:
                step = 1 if kind is _ComputationType.SEND_F else -1
                _note(sent, (rank, ranks.get(stage + step, rank)), action)
                if not any((stage, one, microbatch) in done for one in _COMPUTED[kind]):
                    raise SetupError(f"the schedule in {path} has {action} on rank {rank} before what it sends")
            else:
                for receive, (_, step, needs) in _RECEIVED.items():
                    elsewhere = ranks.get(stage + step, rank) != rank
                    if kind in needs and elsewhere and (stage, receive, microbatch) not in done:
                        missing = _Action(stage, receive, microbatch)
                        raise SetupError(f"the schedule in {path} has {action} on rank {rank} without {missing} before")
            done.add((stage, kind, microbatch))
    for pair in sorted({*sent, *expected}):
        out, into = sent.get(pair, []), expected.get(pair, [])
        if out != into:
            place = next(
                (i for i, (a, b) in enumerate(zip(out, into, strict=False)) if a != b), min(len(out), len(into))
            )
            raise SetupError(
                f"the schedule in {path} sends from rank {pair[0]} to rank {pair[1]}, as message {place},"
                f" {_at(out, place)}, where {_at(into, place)} is received, so tensors would be mixed up. List the"
                " receives in the order of the sends"
            )


def _note(messages: dict[tuple[int, int], list[str]], pair: tuple[int, int], action: _Action) -> None:
    messages.setdefault(pair, []).append(str(action))


def _at(messages: Sequence[str], place: int) -> str:
    return messages[place] if place < len(messages) else "nothing"


def check_combination(
    spec: ScheduleSpec, *, sharding: Sharding | None, reshard_after_forward: bool | None, compiled: bool
) -> None:
    """Refuse combinations that would compute wrong gradients, or fail in the first step.

    ==================================  ==========  ==========================  ==========================
    schedule                            DDP         FSDP2 or replicate          compiled layers
    ==================================  ==========  ==========================  ==========================
    GPipe, 1F1B, LoopedBFS, Interl.     refused     right                       right
    with backwards in two parts         refused     right without resharding    right in place, without
                                                    after forward, else         donated buffers, else
                                                    refused                     refused
    ==================================  ==========  ==========================  ==========================
    """
    if sharding == "ddp":
        raise SetupError(
            "stages are wrapped in DistributedDataParallel, whose gradient reduction does not work with the gradient"
            " accumulation of a pipeline's schedule. For replicated stages use replicate"
            " (torch.distributed._composable)"
        )
    if sharding is not None:
        _check_reduction(spec)
    if not (sharding == "fsdp" and reshard_after_forward) and not compiled:
        return
    split = splits_backward(spec)
    if split is not False and sharding == "fsdp" and reshard_after_forward:
        reason = "lists no actions, so it may run" if split is None else "runs"
        raise SetupError(
            f"parallel.reshard_after_forward is true, and schedule {spec.name} {reason} backwards in two parts, which"
            " gives wrong gradients with it. Disable it: set reshard_after_forward to false, or use 1f1b or"
            " interleaved_1f1b"
        )
    if split and compiled and torch._functorch.config.donated_buffer:
        raise SetupError(
            f"layers are compiled, and schedule {spec.name} runs backwards in two parts, which use a graph's buffers"
            " twice. For this, set torch._functorch.config.donated_buffer to False, and compile layers in place"
            " (Module.compile)"
        )


def _check_reduction(spec: ScheduleSpec) -> None:
    """Check that the schedule has the separate action that reduces gradients over the ranks of a stage."""
    if issubclass(spec.schedule_class, PipelineScheduleMulti) and not issubclass(
        spec.schedule_class, _PipelineScheduleRuntime
    ):
        raise SetupError(
            f"schedule {spec.name} derives from PipelineScheduleMulti, which never reduces gradients over the ranks"
            " that share a stage. Derive it from _PipelineScheduleRuntime"
        )
    actions = read_actions(spec.path) if spec.path is not None else {}
    if any(not action.is_compute_op for row in actions.values() for action in row):
        stages = {one.stage_index for row in actions.values() for each in row for one in each.sub_actions or (each,)}
        for kind in (_ComputationType.UNSHARD, _ComputationType.REDUCE_GRAD):
            have = {a.stage_index for row in actions.values() for a in row if a.computation_type is kind}
            if stages - have:
                raise SetupError(
                    f"the schedule in {spec.path} has no {kind.value} for stage(s) {sorted(stages - have)}; stages that"
                    " are sharded or replicated need one each. Add it, or remove all communication and PyTorch adds it"
                )


def splits_backward(spec: ScheduleSpec) -> bool | None:
    """Return True if backwards run in two parts, for inputs and for weights; None if the schedule lists no actions."""
    if spec.path is not None:
        actions: Actions = read_actions(spec.path)
    else:
        try:
            actions = actions_of(spec, 2, 4)  # the smallest case that all of PyTorch's schedules support
        except SetupError:
            return None
    parts = (_ComputationType.BACKWARD_INPUT, _ComputationType.BACKWARD_WEIGHT)
    return any(action.computation_type in parts for row in actions.values() for action in row) if actions else None
