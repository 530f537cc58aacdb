"""Estimates the memory of each rank of a pipeline from the footprints of the pieces of its stages.

The peak of a step is found by following the rank's actions in order: a forward adds the tensors it keeps, a backward
releases them, and each needs temporary memory while it runs. Durations do not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch.distributed.pipelining.schedules import _Action

from lightning_pipe._compat.pipelining import KEEPS_MESSAGES
from lightning_pipe.llm.measure.layer_bench import Pieces
from lightning_pipe.llm.measure.layer_profile import Footprint
from lightning_pipe.llm.schedules.simulation import KINDS, Actions

__all__ = ["RankMemory", "Sharing", "estimate_memory", "pieces_of_stage"]

T = TypeVar("T")


@dataclass(frozen=True)
class Sharing:
    """Numbers of ranks that share a stage.

    Attributes:
        shard: ranks that share its parameters, gradients and optimiser states with FSDP2 (default 1).
        tensor: ranks that share the matrices of its layers (default 1).
        context: ranks that share the sequences (default 1).
        gathered: True (default) if the gathered parameters of a whole stage exist at the same time; False if only those
            of one piece do.
    """

    shard: int = 1
    tensor: int = 1
    context: int = 1
    gathered: bool = True


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank, in bytes.

    Attributes:
        parameters: parameters, including those gathered from other ranks.
        gradients: gradients at the end of a step.
        optimizer: optimiser states.
        buffers: buffers of the model.
        messages: receive buffers, and sent tensors that are kept until the end of the step.
        activations: peak of the activations kept for backward, and of temporary memory of computations.
        live: maximum number of micro-batches with kept activations; a micro-batch counts once for each stage.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    messages: int
    activations: int
    live: int

    @property
    def total(self) -> int:
        """Total number of bytes."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.messages + self.activations


@dataclass(frozen=True)
class _StageMemory:
    """Memory of one stage and micro-batch: bytes its actions leave, and peaks beyond the memory already in use."""

    kept: int
    held: int
    received: int
    output: int
    in_forward: int
    in_backward: int
    in_input_backward: int
    in_weight_backward: int


def pieces_of_stage(pieces: Pieces[T], layers_per_stage: Sequence[int], stage: int) -> list[T]:
    """Pieces of a stage, in the order of its forward."""
    first = sum(layers_per_stage[:stage])
    found = list(pieces.layers[first : first + layers_per_stage[stage]])
    before = [pieces.input] if stage == 0 and pieces.input is not None else []
    return [*before, *found, *([pieces.output] if stage == len(layers_per_stage) - 1 else [])]


def estimate_memory(
    actions: Actions,
    layers_per_stage: Sequence[int],
    pieces: Pieces[Footprint],
    optimizer_bytes: Pieces[int],
    *,
    sharing: Sharing | None = None,
    keeps_messages: bool = KEEPS_MESSAGES,
) -> list[RankMemory]:
    """Estimate the memory of each rank.

    Args:
        actions: actions by rank, from ``simulation.actions_of``.
        layers_per_stage: number of layers of each stage.
        pieces: footprints for one micro-batch.
        optimizer_bytes: bytes of optimiser states for the parameters of each piece.
        sharing: numbers of ranks that share each stage; None (default) for no sharing. Parameters are assumed to be
            shared evenly, and layers to be sharded completely by tensor parallelism; activations of layers are assumed
            not to be sharded by it.
        keeps_messages: True if hidden states that are received or sent exist until the end of the step; False if those
            of a micro-batch exist until its backward (default: what the installed PyTorch does).

    Returns:
        The memory of each rank of the pipeline, in order.
    """
    shared = sharing or Sharing()
    microbatches = 1 + max((action.microbatch_index or 0 for row in actions.values() for action in row), default=0)
    numbers = range(len(layers_per_stage))
    stages = [_stage_memory(pieces, layers_per_stage, stage, shared, keeps_messages) for stage in numbers]
    # For each piece: its footprint, the bytes of its optimiser states, and the number of ranks that share its matrices.
    sharers = Pieces(1, 1, (shared.tensor,) * len(pieces.layers), 1)
    owned: Pieces[tuple[Footprint, int, int]] = Pieces.of(lambda *parts: parts, pieces, optimizer_bytes, sharers)
    found = []
    for row in actions.values():
        mine = sorted({action.stage_index for action in row})
        parts = [one for stage in mine for one in pieces_of_stage(owned, layers_per_stage, stage)]
        whole = [_divide(one.parameters, tensor) for one, _, tensor in parts]
        gathered = 0 if shared.shard == 1 else sum(whole) if shared.gathered else max(whole, default=0)
        in_step = 0 if shared.shard == 1 else sum(_divide(one.gradients, tensor) for one, _, tensor in parts)
        activations, live = _peak(row, stages)
        found.append(
            RankMemory(
                parameters=sum(_divide(size, shared.shard) for size in whole) + gathered,
                gradients=sum(_divide(one.gradients, tensor * shared.shard) for one, _, tensor in parts) + in_step,
                optimizer=sum(_divide(states, tensor * shared.shard) for _, states, tensor in parts),
                buffers=pieces.empty.buffers * len(mine) + sum(one.buffers for one, *_ in parts),
                messages=sum(_messages(stages, stage, len(mine), microbatches, keeps_messages) for stage in mine),
                activations=activations,
                live=live,
            )
        )
    return found


def _stage_memory(
    pieces: Pieces[Footprint], layers_per_stage: Sequence[int], stage: int, sharing: Sharing, keeps_messages: bool
) -> _StageMemory:
    parts = pieces_of_stage(pieces, layers_per_stage, stage)
    kept, held = pieces.empty.kept, pieces.empty.kept
    in_forward = in_backward = in_first = in_second = 0
    for one in parts:
        in_forward = max(in_forward, kept + one.in_forward)
        kept += one.kept
        # Backward starts at the last piece, so activations of later pieces are released before it reaches this one.
        in_backward = max(in_backward, kept + one.in_backward)
        in_first = max(in_first, kept + one.in_input_backward)
        held += one.held
        in_second = max(in_second, one.in_weight_backward)
    # The first part of a backward frees little until it has passed all pieces, so the held memory adds up.
    in_first = max(in_first, held)
    first = next(iter(parts), pieces.empty)
    received = 0 if stage == 0 else _hidden(pieces, layers_per_stage, stage)
    output = parts[-1].output if parts else first.output
    numbers = [kept, held, received, output, in_forward, in_backward - kept, in_first - kept, in_second]
    if not keeps_messages:  # a received input exists until its backward
        numbers[0] += received
        numbers[1] += received
    return _StageMemory(*(_divide(max(one, 0), sharing.context) for one in numbers))


def _hidden(pieces: Pieces[Footprint], layers_per_stage: Sequence[int], stage: int) -> int:
    """Bytes of the hidden states that a stage after the first receives."""
    before = pieces_of_stage(pieces, layers_per_stage, stage - 1)
    return before[-1].output if before else pieces.empty.output


def _peak(row: Sequence[_Action], stages: Sequence[_StageMemory]) -> tuple[int, int]:
    """Peak number of bytes and of live micro-batches, which count once for each stage."""
    now = most = live = most_live = 0
    for action in row:
        stage, kind = stages[action.stage_index], KINDS[action.computation_type]
        whole_at_once = action.stage_index == 0  # stage 0 has no input gradients, so the first part does nothing
        if kind == "forward":
            most = max(most, now + stage.in_forward)
            now, live = now + stage.kept, live + 1
        elif kind == "backward" or (kind == "weight_backward" and whole_at_once):
            most = max(most, now + stage.in_backward)
            now, live = now - stage.kept, live - 1
        elif kind == "input_backward" and not whole_at_once:
            most = max(most, now + stage.in_input_backward)
            now += stage.held - stage.kept
        elif kind == "weight_backward":
            most = max(most, now + stage.in_weight_backward)
            now, live = now - stage.held, live - 1
        most, most_live = max(most, now), max(most_live, live)
    return most, most_live


def _messages(
    stages: Sequence[_StageMemory], stage: int, stages_of_rank: int, microbatches: int, keeps_messages: bool
) -> int:
    """Bytes of receive buffers for hidden states and their gradients, and of sent tensors that PyTorch keeps."""
    last = stage == len(stages) - 1
    received, output = stages[stage].received, 0 if last else stages[stage].output
    if keeps_messages:
        # Gradients of received tensors are kept; with several stages a rank, sent outputs are kept, too.
        return microbatches * (2 * received + output + (0 if stages_of_rank == 1 else output))
    # Gradients, received and sent, stay until the end of the step; hidden states belong to their micro-batch.
    return microbatches * (received + output)


def _divide(number: int, parts: int) -> int:
    return -(-number // parts)
