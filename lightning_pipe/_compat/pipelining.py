"""Private names of ``torch.distributed.pipelining``.

PyTorch 2.14 made steps over given micro-batches public (``step(arg_mbs=...)``); 2.13 has a private method for them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping as ranks_by_stage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _add_send_recv, _add_unshard_reshard
from torch.distributed.pipelining.schedules import _Action as Action
from torch.distributed.pipelining.schedules import _ComputationType as ComputationType
from torch.distributed.pipelining.schedules import _PipelineSchedule as Schedule
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as RuntimeSchedule
from torch.distributed.tensor import DTensor

from lightning_pipe._compat.torch import is_view, storage_key

__all__ = [
    "Action",
    "ComputationType",
    "ForwardSchedule",
    "RuntimeSchedule",
    "Schedule",
    "copy_view_outputs",
    "ranks_by_stage",
    "register_overlapped_fb_function",
    "release_schedule_tensors",
    "run_microbatches",
    "run_weight_backward",
    "set_schedule_actions",
    "set_schedule_communication",
    "split_overlapped_actions",
    "stage_backward_input",
    "stage_backward_weight",
]

_BACKWARDS = (ComputationType.FULL_BACKWARD, ComputationType.BACKWARD_INPUT)
_TAKES_MICROBATCHES = "arg_mbs" in inspect.signature(PipelineScheduleSingle.step).parameters


def run_microbatches(
    schedule: Schedule,
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
        for stage in _get_schedule_stages(schedule):
            stage.has_backward = schedule._has_backward
            stage.clear_runtime_states()
        schedule._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs=False)


def _get_schedule_stages(schedule: Any) -> list[Any]:
    return [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages


def register_overlapped_fb_function(
    schedule: Any, run: Callable[[Any, Any, Callable[[], None], Callable[[], None]], None]
) -> None:
    """Let *run* run the forward and the backward of a schedule's overlapped actions, which PyTorch runs one by one.

    A schedule with a function of its own for such actions keeps it. *run* is called with the stages of a forward and of
    a backward, and with functions that run them.
    """
    overlapped = ComputationType.OVERLAP_F_B
    rows = getattr(schedule, "pipeline_order_with_comms", None) or {}
    actions = [action for row in rows.values() for action in row]
    parts = [action.sub_actions or () for action in actions if action.computation_type is overlapped]
    pairs = [{ComputationType.FORWARD, backward} for backward in _BACKWARDS]
    usual = all({sub_action.computation_type for sub_action in pair} in pairs and len(pair) == 2 for pair in parts)
    if parts and usual and overlapped not in schedule._comp_type_to_function_map:
        schedule.register_custom_function(overlapped, partial(_run_overlapped_action, run))


def _run_overlapped_action(run: Callable[..., None], action: Action, context: Any) -> None:
    """As PyTorch's runtime, except for the order of the two computations."""
    schedule = context.schedule_ref
    stages = {stage.stage_index: stage for stage in schedule._stages}
    forward, backward = sorted(
        action.sub_actions or (), key=lambda sub_action: sub_action.computation_type != ComputationType.FORWARD
    )
    for sub_action, received in ((forward, schedule.fwd_recv_ops), (backward, schedule.bwd_recv_ops)):
        schedule._assert_unsharded(stages[sub_action.stage_index])
        for work in received.pop((sub_action.stage_index, sub_action.microbatch_index), ()):
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
        is_full = backward.computation_type == ComputationType.FULL_BACKWARD
        schedule.backward_counter[backward.stage_index] += is_full
        last = schedule.backward_counter[backward.stage_index] == schedule._n_microbatches
        loss = schedule._maybe_get_loss(stage, index)
        stage.backward_one_chunk(index, loss=loss, full_backward=is_full, last_backward=is_full and last)
        if previous := stages.get(backward.stage_index - 1):
            previous.set_local_bwd_input(stage.get_local_bwd_output(index), index)

    if forward.stage_index == backward.stage_index:
        # FSDP would release the parameters after the forward, while the backward uses them.
        run_forward()
        run_backward()
    else:
        run(stages[forward.stage_index], stages[backward.stage_index], run_forward, run_backward)


def copy_view_outputs(stage: Any, microbatch: int) -> None:
    """Replace outputs of a stage that are views by copies, before a backward for the inputs alone.

    PyTorch detaches the outputs in place after such a backward, which fails for a view, such as the output of a linear
    layer over sequences.
    """
    outputs, inputs = stage.fwd_cache[microbatch]
    stage.fwd_cache[microbatch] = tuple(map(_clone_if_view, outputs)), inputs


def _clone_if_view(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and is_view(value) else value


def run_weight_backward(stage: Any, microbatch: int, run: Callable[[], None]) -> None:
    """Run a stage's backward for the weights alone, and give each parameter a gradient with memory of its own.

    PyTorch adds the next micro-batch's gradient in place, which would change all tensors that share its memory. The
    gradient of a parameter that is added to hidden states is theirs, and another parameter may have the same.
    """
    first = [parameter for parameter in stage.submod.parameters() if parameter.grad is None]
    _, groups, *_ = stage.backward_state.get(microbatch, (None, None))
    captured = [gradient for group in groups or () for gradients in group.get("grads", ()) for gradient in gradients]
    taken = {_gradient_storage_key(gradient) for gradient in captured if first and gradient is not None}
    del captured
    run()
    for parameter in first:
        if parameter.grad is not None:
            key = _gradient_storage_key(parameter.grad)
            if key in taken:
                parameter.grad = parameter.grad.clone()
            taken.add(key)


@torch.no_grad()
def _gradient_storage_key(gradient: Tensor) -> int:
    return storage_key(gradient.to_local() if isinstance(gradient, DTensor) else gradient)


def set_schedule_actions(schedule: Any, actions: Mapping[int, Sequence[Action | None]]) -> None:
    """Let a schedule run these computations of each rank, to which PyTorch adds the communication."""
    schedule.pipeline_order = actions
    schedule._prepare_schedule_with_comms(actions)


def set_schedule_communication(schedule: Any, defer_pp_recv: bool, max_active_stages: int) -> None:
    """Add the communication to a schedule's computations again, with other options than PyTorch's defaults."""
    add_unshard_reshard = schedules._add_unshard_reshard
    schedules._add_unshard_reshard = partial(add_unshard_reshard, max_active_stages=max_active_stages)
    try:
        schedule._prepare_schedule_with_comms(schedule.pipeline_order)
    finally:
        schedules._add_unshard_reshard = add_unshard_reshard
    if defer_pp_recv:
        early, ranks = schedule.pipeline_order_with_comms, schedule.stage_index_to_group_rank
        schedule.pipeline_order_with_comms = {
            rank: _keep_receive_order(early[rank], row, ranks)
            for rank, row in schedules._defer_recv_ops(early, stage_to_rank=ranks.__getitem__).items()
        }


def _keep_receive_order(early: list[Action], deferred: list[Action], ranks: Mapping[int, int]) -> list[Action]:
    """Post the receives from each rank in their first order, which is that of its sends.

    PyTorch 2.14 defers the receives of activations and those of gradients independently. If both come from one rank,
    it may receive one as the other: messages between two ranks are matched by their order alone.
    """
    steps = {ComputationType.RECV_F: -1, ComputationType.RECV_B: 1}
    pending: dict[int, list[Action]] = {}
    for action in early:
        if (step := steps.get(action.computation_type)) is not None:
            pending.setdefault(ranks[action.stage_index + step], []).append(action)
    row: list[Action] = []
    for action in deferred:
        step = steps.get(action.computation_type)
        if step is None:
            row.append(action)
            continue
        receives = pending[ranks[action.stage_index + step]]
        due = receives.index(action) + 1 if action in receives else 0
        row += receives[:due]
        del receives[:due]
    return row


def split_overlapped_actions(schedule: Any) -> None:
    """Split overlapped actions, so that a forward's output is sent before the backward of the same action.

    PyTorch runs the two parts of such an action one after the other, and sends the outputs of both when both are done,
    so neighbors would wait for a backward that they do not need. The order of computations stays the same. Without
    tokens of experts to send, nothing would be gained by running both at a time.
    """
    parted = {
        rank: [part for action in row for part in (action.sub_actions or (action,) if action is not None else (None,))]
        for rank, row in schedule.pipeline_order.items()
    }
    set_schedule_actions(schedule, parted)


def release_schedule_tensors(schedule: Schedule) -> None:
    """Release the tensors that PyTorch would keep until the next step."""
    schedule._internal_losses.clear()
    for stage in _get_schedule_stages(schedule):
        stage.clear_runtime_states()  # outputs, an evaluation's inputs, gradients of receive buffers
        stage.bwd_cache.clear()  # the first stage's gradients of its inputs, which are unused
        stage.backward_state.clear()
        stage.dw_runner.clear()


class ForwardSchedule(RuntimeSchedule):
    """Forwards of all micro-batches of one stage, then of the rank's next, as LoopedBFS before its backwards."""

    def __init__(
        self,
        stages: list[PipelineStage],
        num_microbatches: int,
        rank_of_stage: dict[int, int],
        result_of: Callable[..., Any] | None,
    ) -> None:
        super().__init__(stages, num_microbatches, loss_fn=result_of, scale_grads=False)
        self._has_backward = False
        self.stage_index_to_group_rank = rank_of_stage
        for stage in stages:
            stage.stage_index_to_group_rank = rank_of_stage
        self.pipeline_order = {
            rank: [
                Action(stage, ComputationType.FORWARD, microbatch)
                for stage, holder in rank_of_stage.items()
                if holder == rank
                for microbatch in range(num_microbatches)
            ]
            for rank in range(self.pp_group_size)
        }
        self.pipeline_order_with_comms = _add_send_recv(
            {rank: _add_unshard_reshard(list(actions)) for rank, actions in self.pipeline_order.items()},
            stage_to_rank=rank_of_stage.__getitem__,
            num_stages=self._num_stages,
        )

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: Any = None
    ) -> None:
        super()._maybe_compute_loss(stage, output, target_mbs, mb_index, loss_kwargs)
        if stage.is_last:
            del stage.fwd_cache[mb_index]  # PyTorch frees it in backward, so all outputs would stay until the end
