"""How many bytes each rank of a pipeline needs, from what each piece of its stages does.

What is there in a step is found by going through the rank's actions in their order: a forward adds what it keeps, a
backward takes it away, and each needs something more while it runs. Times do not matter to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch.distributed.pipelining.schedules import _Action

from lightning_pipe.llm.measure.layer_bench import Pieces
from lightning_pipe.llm.measure.layer_profile import Footprint
from lightning_pipe.llm.schedules.simulation import KINDS, Actions

__all__ = ["RankMemory", "Sharing", "estimate_memory", "pieces_of_stage"]

T = TypeVar("T")


@dataclass(frozen=True)
class Sharing:
    """How many ranks share what a stage has.

    Attributes:
        shard: its parameters, gradients and optimiser states (FSDP2).
        tensor: the matrices of its layers.
        context: the sequences.
        gathered: whether a whole stage's sharded parameters are there at a time; else those of one piece.
    """

    shard: int = 1
    tensor: int = 1
    context: int = 1
    gathered: bool = True


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    Attributes:
        parameters: with those gathered from other ranks.
        gradients: at the end of a step.
        optimizer: states of optimisers.
        buffers: of the model.
        messages: buffers of what is received, and what is kept of what was sent until the step's end.
        activations: the most that forwards keep for backwards at a time, and that computations need beside it.
        live: most micro-batches that forwards keep something of, once for each stage.
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
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.buffers + self.messages + self.activations


@dataclass(frozen=True)
class _StageMemory:
    """Of one stage and micro-batch: what its actions leave, and the most that they need beyond what is there."""

    kept: int
    held: int
    received: int
    output: int
    in_forward: int
    in_backward: int
    in_input_backward: int
    in_weight_backward: int


def pieces_of_stage(pieces: Pieces[T], layers_per_stage: Sequence[int], stage: int) -> list[T]:
    """What a stage is made of, in the order of its forward."""
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
) -> list[RankMemory]:
    """What each rank needs.

    Args:
        actions: by rank, as ``simulation.actions_of`` gives them.
        layers_per_stage: of all stages.
        pieces: of one micro-batch.
        optimizer_bytes: states that optimisers keep for the parameters of each piece.
        sharing: of each stage, with other ranks. Layers are taken to be shared evenly, by tensor parallelism wholly;
            what layers keep is not.

    Returns:
        By rank of the pipeline.
    """
    shared = sharing or Sharing()
    microbatches = 1 + max((action.microbatch_index or 0 for row in actions.values() for action in row), default=0)
    stages = [_stage_memory(pieces, layers_per_stage, stage, shared) for stage in range(len(layers_per_stage))]
    # Of each piece: itself, its optimiser's states, how many ranks share its matrices.
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
                messages=microbatches * sum(_messages(stages, stage, len(mine)) for stage in mine),
                activations=activations,
                live=live,
            )
        )
    return found


def _stage_memory(
    pieces: Pieces[Footprint], layers_per_stage: Sequence[int], stage: int, sharing: Sharing
) -> _StageMemory:
    parts = pieces_of_stage(pieces, layers_per_stage, stage)
    kept, held = pieces.empty.kept, pieces.empty.kept
    in_forward = in_backward = in_first = in_second = 0
    for one in parts:
        in_forward = max(in_forward, kept + one.in_forward)
        kept += one.kept
        # A backward begins behind: what later pieces kept is gone when it comes to this one.
        in_backward = max(in_backward, kept + one.in_backward)
        in_first = max(in_first, kept + one.in_input_backward)
        held += one.held
        in_second = max(in_second, one.in_weight_backward)
    # The first part of a backward frees little before it has been through all pieces: what is held builds up.
    in_first = max(in_first, held)
    first = next(iter(parts), pieces.empty)
    received = 0 if stage == 0 else _hidden(pieces, layers_per_stage, stage)
    output = parts[-1].output if parts else first.output
    numbers = (kept, held, received, output, in_forward, in_backward - kept, in_first - kept, in_second)
    return _StageMemory(*(_divide(max(one, 0), sharing.context) for one in numbers))


def _hidden(pieces: Pieces[Footprint], layers_per_stage: Sequence[int], stage: int) -> int:
    """Bytes of what a stage after the first receives."""
    before = pieces_of_stage(pieces, layers_per_stage, stage - 1)
    return before[-1].output if before else pieces.empty.output


def _peak(row: Sequence[_Action], stages: Sequence[_StageMemory]) -> tuple[int, int]:
    """The most bytes, and the most micro-batches, once for each stage."""
    now = most = live = most_live = 0
    for action in row:
        stage, kind = stages[action.stage_index], KINDS[action.computation_type]
        whole_at_once = action.stage_index == 0  # no gradients for inputs: a first part does nothing
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


def _messages(stages: Sequence[_StageMemory], stage: int, stages_of_rank: int) -> int:
    """Of one micro-batch: buffers for hidden states and their gradients, and what is sent, while PyTorch keeps it."""
    last = stage == len(stages) - 1
    received = stages[stage].received + (0 if last else stages[stage].output)
    # Gradients of what was received stay in the buffers; of several stages a rank, outputs stay where they were sent.
    kept = stages[stage].received + (0 if last or stages_of_rank == 1 else stages[stage].output)
    return received + kept


def _divide(number: int, parts: int) -> int:
    return -(-number // parts)
