"""Estimates the memory of each rank of a pipeline from the footprints of the pieces of its stages.

The peak of a step is found by following the rank's actions in order: a forward adds the tensors it keeps, a backward
releases them, and each needs temporary memory while it runs. Durations do not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from lightning_pipe._compat.pipelining import Action
from lightning_pipe.llm.measure.layer_bench import ModelPieceResults
from lightning_pipe.llm.measure.layer_profile import Footprint
from lightning_pipe.llm.schedules.simulation import KINDS, Actions

T = TypeVar("T")


@dataclass(frozen=True)
class ShardCounts:
    """Numbers of ranks that share a stage."""

    shard: int = 1  # ranks that share its parameters, gradients and optimizer states with FSDP2
    tensor: int = 1  # ranks that share the matrices of its layers
    context: int = 1  # ranks that share the sequences
    expert: int = 1  # ranks that share the experts of its layers
    # Bytes of a gradient before its reduction, for each byte of the reduced gradient.
    unreduced_to_reduced_bytes: float = 1.0
    # True if the gathered parameters of a whole stage exist at the same time; False if only those of one piece do
    gathers_whole_stage: bool = True


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank, in bytes."""

    parameters: int  # parameters, including those gathered from other ranks
    gradients: int  # reduced gradients, and those that are not reduced yet when the rank needs the most memory
    optimizer: int  # optimizer states
    buffers: int  # buffers of the model
    messages: int  # receive buffers, and sent tensors that are kept until the end of the step
    activations: int  # peak of the activations kept for backward, and of temporary memory of computations
    live_microbatches: (
        int  # maximum number of micro-batches with kept activations; a micro-batch counts once for each stage
    )

    @property
    def total(self) -> int:
        """Total number of bytes."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.messages + self.activations


@dataclass(frozen=True)
class _StageActivationMemory:
    """Memory of one stage and micro-batch: bytes its actions leave, and peaks beyond the memory already in use."""

    after_forward: int
    after_input_backward: int
    received: int
    output: int
    in_forward: int
    in_backward: int
    in_input_backward: int
    in_weight_backward: int


class _ShardedBytes(NamedTuple):
    """Bytes of a piece on one rank: its own part, and the whole that FSDP2 gathers (0 if it gathers nothing)."""

    local: int
    gathered: int

    @classmethod
    def from_unsharded_size(cls, size: int, experts: int, tensor: int, sharing: ShardCounts) -> _ShardedBytes:
        common, experts = _ceil_div(size - experts, tensor), _ceil_div(experts, tensor)
        local = _ceil_div(common, sharing.shard) + _ceil_div(experts, max(sharing.shard, sharing.expert))
        # FSDP2 shards experts over the ranks that hold the same ones.
        gathered_experts = _ceil_div(experts, sharing.expert) if sharing.shard > sharing.expert else 0
        return cls(local, gathered_experts + (common if sharing.shard > 1 else 0))


class _PieceMemory(NamedTuple):
    parameters: _ShardedBytes
    gradients: _ShardedBytes
    optimizer: _ShardedBytes
    buffers: int

    @classmethod
    def from_footprint(cls, sharing: ShardCounts, piece: Footprint, states: int, tensor: int) -> _PieceMemory:
        """Memory of a piece on one rank; experts have the same share of gradients and states as of parameters."""

        def compute_sharded_bytes(size: int) -> _ShardedBytes:
            return _ShardedBytes.from_unsharded_size(
                size, size * piece.experts // max(piece.parameters, 1), tensor, sharing
            )

        return cls(
            compute_sharded_bytes(piece.parameters),
            compute_sharded_bytes(piece.gradients),
            compute_sharded_bytes(states),
            piece.buffers,
        )


def pieces_of_stage(pieces: ModelPieceResults[T], layers_per_stage: Sequence[int], stage: int) -> list[T]:
    """Pieces of a stage, in the order of its forward."""
    first = sum(layers_per_stage[:stage])
    layers = list(pieces.layers[first : first + layers_per_stage[stage]])
    inputs = [pieces.input] if stage == 0 and pieces.input is not None else []
    return [*inputs, *layers, *([pieces.output] if stage == len(layers_per_stage) - 1 else [])]


def estimate_memory(
    actions: Actions,
    layers_per_stage: Sequence[int],
    pieces: ModelPieceResults[Footprint],
    optimizer_bytes: ModelPieceResults[int],
    *,
    sharing: ShardCounts | None = None,
    keeps_messages: bool = True,
) -> list[RankMemory]:
    """Estimate the memory of each rank."""
    shared = sharing or ShardCounts()
    microbatches = 1 + max((action.microbatch_index or 0 for row in actions.values() for action in row), default=0)
    numbers = range(len(layers_per_stage))
    stages = [
        _estimate_stage_activation_memory(pieces, layers_per_stage, stage, shared, keeps_messages) for stage in numbers
    ]
    sharers = ModelPieceResults(
        1, 1, (shared.tensor,) * len(pieces.layers), 1
    )  # ranks that share the matrices of a piece
    owned = ModelPieceResults.map(partial(_PieceMemory.from_footprint, shared), pieces, optimizer_bytes, sharers)
    stage_pieces = [pieces_of_stage(owned, layers_per_stage, stage) for stage in numbers]
    unreduced = [
        round(shared.unreduced_to_reduced_bytes * sum(piece.gradients.gathered for piece in parts))
        for parts in stage_pieces
    ]
    ranks = []
    for row in actions.values():
        rank_stages = sorted({action.stage_index for action in row})
        parts = [piece for stage in rank_stages for piece in stage_pieces[stage]]
        gathered = [piece.parameters.gathered for piece in parts]
        activations, in_step, live = _find_activation_and_gradient_peak(row, stages, unreduced)
        ranks.append(
            RankMemory(
                parameters=sum(piece.parameters.local for piece in parts)
                + (sum(gathered) if shared.gathers_whole_stage else max(gathered, default=0)),
                gradients=sum(piece.gradients.local for piece in parts) + in_step,
                optimizer=sum(piece.optimizer.local for piece in parts),
                buffers=pieces.empty.buffers * len(rank_stages) + sum(piece.buffers for piece in parts),
                messages=sum(
                    _estimate_message_buffer_bytes(stages, stage, len(rank_stages), microbatches, keeps_messages)
                    for stage in rank_stages
                ),
                activations=activations,
                live_microbatches=live,
            )
        )
    return ranks


def _estimate_stage_activation_memory(
    pieces: ModelPieceResults[Footprint],
    layers_per_stage: Sequence[int],
    stage: int,
    sharing: ShardCounts,
    keeps_messages: bool,
) -> _StageActivationMemory:
    parts = pieces_of_stage(pieces, layers_per_stage, stage)
    after_forward, after_input_backward = pieces.empty.after_forward, pieces.empty.after_forward
    in_forward = in_backward = in_first = in_second = 0
    for part in parts:
        in_forward = max(in_forward, after_forward + part.in_forward)
        after_forward += part.after_forward
        # Backward starts at the last piece, so activations of later pieces are released before it reaches this one.
        in_backward = max(in_backward, after_forward + part.in_backward)
        in_first = max(in_first, after_forward + part.in_input_backward)
        after_input_backward += part.after_input_backward
        in_second = max(in_second, part.in_weight_backward)
    # The first part of a backward frees little until it has passed all pieces, so the held memory adds up.
    in_first = max(in_first, after_input_backward)
    first = next(iter(parts), pieces.empty)
    received = 0 if stage == 0 else _get_received_hidden_bytes(pieces, layers_per_stage, stage)
    output = parts[-1].output if parts else first.output
    numbers = [
        after_forward,
        after_input_backward,
        received,
        output,
        in_forward,
        in_backward - after_forward,
        in_first - after_forward,
        in_second,
    ]
    if not keeps_messages:  # a received input exists until its backward
        numbers[0] += received
        numbers[1] += received
    return _StageActivationMemory(*(_ceil_div(max(number, 0), sharing.context) for number in numbers))


def _get_received_hidden_bytes(
    pieces: ModelPieceResults[Footprint], layers_per_stage: Sequence[int], stage: int
) -> int:
    """Bytes of the hidden states that a stage after the first receives."""
    previous = pieces_of_stage(pieces, layers_per_stage, stage - 1)
    return previous[-1].output if previous else pieces.empty.output


def _find_activation_and_gradient_peak(
    row: Sequence[Action], stages: Sequence[_StageActivationMemory], unreduced: Sequence[int]
) -> tuple[int, int, int]:
    """Bytes of activations and of unreduced gradients at the peak of their sum, and most live micro-batches.

    Micro-batches count once for each stage. Gradients of a stage are reduced after its last backward.
    """
    current = waiting = live = most_live = 0
    peak = 0, 0
    kinds = [(action.stage_index, KINDS[action.computation_type]) for action in row]
    remaining = Counter(index for index, kind in kinds if kind in ("backward", "weight_backward"))
    started: set[int] = set()
    for index, kind in kinds:
        stage = stages[index]
        whole_at_once = index == 0  # stage 0 has no input gradients, so the first part does nothing
        if kind != "forward" and index not in started:
            started.add(index)
            waiting += unreduced[index]
        inside = change = 0
        if kind == "forward":
            inside, change, live = stage.in_forward, stage.after_forward, live + 1
        elif kind == "backward" or (kind == "weight_backward" and whole_at_once):
            inside, change, live = stage.in_backward, -stage.after_forward, live - 1
        elif kind == "input_backward" and not whole_at_once:
            inside, change = stage.in_input_backward, stage.after_input_backward - stage.after_forward
        elif kind == "weight_backward":
            inside, change, live = stage.in_weight_backward, -stage.after_input_backward, live - 1
        peak = max(peak, (current + max(inside, change), waiting), key=sum)
        current, most_live = current + change, max(most_live, live)
        if kind in ("backward", "weight_backward"):
            remaining[index] -= 1
            waiting -= 0 if remaining[index] else unreduced[index]
    return *peak, most_live


def _estimate_message_buffer_bytes(
    stages: Sequence[_StageActivationMemory], stage: int, stages_of_rank: int, microbatches: int, keeps_messages: bool
) -> int:
    """Bytes of receive buffers for hidden states and their gradients, and of sent tensors that PyTorch keeps."""
    last = stage == len(stages) - 1
    received, output = stages[stage].received, 0 if last else stages[stage].output
    if keeps_messages:
        # Gradients of received tensors are kept; with several stages a rank, sent outputs are kept, too.
        return microbatches * (2 * received + output + (0 if stages_of_rank == 1 else output))
    # Gradients, received and sent, stay until the end of the step; hidden states belong to their micro-batch.
    return microbatches * (received + output)


def _ceil_div(number: int, parts: int) -> int:
    return -(-number // parts)
