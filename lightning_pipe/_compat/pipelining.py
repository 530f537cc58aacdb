"""Private names of ``torch.distributed.pipelining``.

PyTorch 2.14 made steps over given micro-batches public (``step(arg_mbs=...)``); 2.13 has a private method for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _ComputationType,
    _PipelineSchedule,
)

from lightning_pipe._compat.torch import is_view

_BACKWARDS = (_ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_INPUT)
_TAKES_MICROBATCHES = "arg_mbs" in inspect.signature(PipelineScheduleSingle.step).parameters


def run_microbatches(
    schedule: _PipelineSchedule,
    stages: Sequence[Any],
    arg_mbs: list[tuple[Any, ...]],
    kwarg_mbs: list[dict[str, Any]],
    target_mbs: list[Any] | None,
    losses: list[Any] | None,
) -> None:
    """Run one step of a schedule over given micro-batches, without keeping the last stage's outputs."""
    if _TAKES_MICROBATCHES:
        step: Callable[..., Any] = schedule.step
        step(arg_mbs=arg_mbs, kwarg_mbs=kwarg_mbs, target_mbs=target_mbs, losses=losses, return_outputs=False)
    else:
        for stage in stages:
            stage.has_backward = schedule._has_backward
            stage.clear_runtime_states()
        schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs=False)


def run_overlapped(schedule: Any, run: Callable[[Any, Any, Callable[[], None], Callable[[], None]], None]) -> None:
    """Let *run* run a schedule's overlapped forwards and backwards, which PyTorch would run one after the other."""
    overlapped = _ComputationType.OVERLAP_F_B
    rows = getattr(schedule, "pipeline_order_with_comms", None) or {}  # a file with communication has no other order
    actions = [action for row in rows.values() for action in row]
    parts = [action.sub_actions or () for action in actions if action.computation_type is overlapped]
    pairs = [{_ComputationType.FORWARD, one} for one in _BACKWARDS]
    usual = all({one.computation_type for one in pair} in pairs and len(pair) == 2 for pair in parts)
    if parts and usual and overlapped not in schedule._comp_type_to_function_map:
        schedule.register_custom_function(overlapped, partial(_overlap, run))


def _overlap(run: Callable[..., None], action: _Action, context: Any) -> None:
    """As PyTorch's runtime, except for the order of the two computations."""
    schedule = context.schedule_ref
    stages = {stage.stage_index: stage for stage in schedule._stages}
    forward, backward = sorted(
        action.sub_actions or (), key=lambda one: one.computation_type != _ComputationType.FORWARD
    )
    for one, received in ((forward, schedule.fwd_recv_ops), (backward, schedule.bwd_recv_ops)):
        schedule._assert_unsharded(stages[one.stage_index])
        for work in received.pop((one.stage_index, one.microbatch_index), ()):
            work.wait()

    def run_forward() -> None:
        stage, index = stages[forward.stage_index], forward.microbatch_index
        output = stage.forward_one_chunk(
            index, context.arg_mbs[index], context.kwarg_mbs[index], save_forward_output=False
        )
        schedule._maybe_compute_loss(stage, output, context.target_mbs, index)
        if following := stages.get(forward.stage_index + 1):
            following.set_local_fwd_input(output, index)

    def run_backward() -> None:
        stage, index = stages[backward.stage_index], backward.microbatch_index
        whole = backward.computation_type == _ComputationType.FULL_BACKWARD
        schedule.backward_counter[backward.stage_index] += whole
        last = schedule.backward_counter[backward.stage_index] == schedule._n_microbatches
        loss = schedule._maybe_get_loss(stage, index)
        stage.backward_one_chunk(index, loss=loss, full_backward=whole, last_backward=whole and last)
        if previous := stages.get(backward.stage_index - 1):
            previous.set_local_bwd_input(stage.get_local_bwd_output(index), index)

    if forward.stage_index == backward.stage_index:
        # FSDP would release the parameters after the forward, while the backward uses them.
        run_forward()
        run_backward()
    else:
        run(stages[forward.stage_index], stages[backward.stage_index], run_forward, run_backward)


def make_detachable(stage: Any, microbatch: int) -> None:
    """Replace outputs of a stage that are views by copies: PyTorch detaches outputs in place, which fails for views."""
    outputs, inputs = stage.fwd_cache[microbatch]
    stage.fwd_cache[microbatch] = tuple(map(_not_a_view, outputs)), inputs


def _not_a_view(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and is_view(value) else value


def forget_output(stage: Any, microbatch: int) -> None:
    """Release the output of a stage that runs no backward, which would be kept until the end of the step."""
    del stage.fwd_cache[microbatch]
