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
from lightning_pipe.llm.measure.layer_bench import Pieces
from lightning_pipe.llm.measure.layer_profile import Footprint
from lightning_pipe.llm.schedules.simulation import KINDS, Actions

T = TypeVar("T")


@dataclass(frozen=True)
class Sharing:
    """Numbers of ranks that share a stage."""

    shard: int = 1  # ranks that share its parameters, gradients and optimiser states with FSDP2
    tensor: int = 1  # ranks that share the matrices of its layers
    context: int = 1  # ranks that share the sequences
    expert: int = 1  # ranks that share the experts of its layers
    unreduced: float = 1.0  # bytes of a gradient before its reduction, for each byte of the reduced gradient
    # True if the gathered parameters of a whole stage exist at the same time; False if only those of one piece do
    gathered: bool = True


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank, in bytes."""

    parameters: int  # parameters, including those gathered from other ranks
    gradients: int  # reduced gradients, and those that are not reduced yet when the rank needs the most memory
    optimizer: int  # optimiser states
    buffers: int  # buffers of the model
    messages: int  # receive buffers, and sent tensors that are kept until the end of the step
    activations: int  # peak of the activations kept for backward, and of temporary memory of computations
    live: int  # maximum number of micro-batches with kept activations; a micro-batch counts once for each stage

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


class _Shared(NamedTuple):
    """Bytes of a piece on one rank: its own part, and the whole that FSDP2 gathers (0 if it gathers nothing)."""

    own: int
    gathered: int

    @classmethod
    def of(cls, size: int, experts: int, tensor: int, sharing: Sharing) -> _Shared:
        common, experts = _divide(size - experts, tensor), _divide(experts, tensor)
        own = _divide(common, sharing.shard) + _divide(experts, max(sharing.shard, sharing.expert))
        # FSDP2 shards experts over the ranks that hold the same ones.
        spread = _divide(experts, sharing.expert) if sharing.shard > sharing.expert else 0
        return cls(own, spread + (common if sharing.shard > 1 else 0))


class _PieceMemory(NamedTuple):
    parameters: _Shared
    gradients: _Shared
    optimizer: _Shared
    buffers: int

    @classmethod
    def of(cls, sharing: Sharing, piece: Footprint, states: int, tensor: int) -> _PieceMemory:
        """Memory of a piece on one rank; experts have the same share of gradients and states as of parameters."""

        def shared(size: int) -> _Shared:
            return _Shared.of(size, size * piece.experts // max(piece.parameters, 1), tensor, sharing)

        return cls(shared(piece.parameters), shared(piece.gradients), shared(states), piece.buffers)


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
    keeps_messages: bool = True,
) -> list[RankMemory]:
    """Estimate the memory of each rank."""
    shared = sharing or Sharing()
    microbatches = 1 + max((action.microbatch_index or 0 for row in actions.values() for action in row), default=0)
    numbers = range(len(layers_per_stage))
    stages = [_stage_memory(pieces, layers_per_stage, stage, shared, keeps_messages) for stage in numbers]
    sharers = Pieces(1, 1, (shared.tensor,) * len(pieces.layers), 1)  # ranks that share the matrices of a piece
    owned = Pieces.of(partial(_PieceMemory.of, shared), pieces, optimizer_bytes, sharers)
    held = [pieces_of_stage(owned, layers_per_stage, stage) for stage in numbers]
    unreduced = [round(shared.unreduced * sum(one.gradients.gathered for one in parts)) for parts in held]
    found = []
    for row in actions.values():
        mine = sorted({action.stage_index for action in row})
        parts = [one for stage in mine for one in held[stage]]
        gathered = [one.parameters.gathered for one in parts]
        activations, in_step, live = _peak(row, stages, unreduced)
        found.append(
            RankMemory(
                parameters=sum(one.parameters.own for one in parts)
                + (sum(gathered) if shared.gathered else max(gathered, default=0)),
                gradients=sum(one.gradients.own for one in parts) + in_step,
                optimizer=sum(one.optimizer.own for one in parts),
                buffers=pieces.empty.buffers * len(mine) + sum(one.buffers for one in parts),
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


def _peak(row: Sequence[Action], stages: Sequence[_StageMemory], unreduced: Sequence[int]) -> tuple[int, int, int]:
    """Bytes of activations and of unreduced gradients at the peak of their sum, and most live micro-batches.

    Micro-batches count once for each stage. Gradients of a stage are reduced after its last backward.
    """
    now = waiting = live = most_live = 0
    peak = 0, 0
    kinds = [(action.stage_index, KINDS[action.computation_type]) for action in row]
    left = Counter(index for index, kind in kinds if kind in ("backward", "weight_backward"))
    begun: set[int] = set()
    for index, kind in kinds:
        stage = stages[index]
        whole_at_once = index == 0  # stage 0 has no input gradients, so the first part does nothing
        if kind != "forward" and index not in begun:
            begun.add(index)
            waiting += unreduced[index]
        inside = change = 0
        if kind == "forward":
            inside, change, live = stage.in_forward, stage.kept, live + 1
        elif kind == "backward" or (kind == "weight_backward" and whole_at_once):
            inside, change, live = stage.in_backward, -stage.kept, live - 1
        elif kind == "input_backward" and not whole_at_once:
            inside, change = stage.in_input_backward, stage.held - stage.kept
        elif kind == "weight_backward":
            inside, change, live = stage.in_weight_backward, -stage.held, live - 1
        peak = max(peak, (now + max(inside, change), waiting), key=sum)
        now, most_live = now + change, max(most_live, live)
        if kind in ("backward", "weight_backward"):
            left[index] -= 1
            waiting -= 0 if left[index] else unreduced[index]
    return *peak, most_live


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
