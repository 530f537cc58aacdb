"""A small residual model in stages, and what one device makes of it, for the tests of schedules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _Action,
    _batch_p2p,
    _ComputationType,
    _PipelineScheduleRuntime,
    _wait_batch_p2p,
)

from lightning_pipe._compat.pipelining import set_schedule_actions
from lightning_pipe.engine.observe.timeline import Bar
from lightning_pipe.llm.schedules.simulation import Actions
from lightning_pipe.llm.schedules.specs import ScheduleSpec, stages_of_rank
from lightning_pipe.llm.schedules.timed_stage import TimedStage

TOKENS, LENGTH, ROWS, WIDTH, BLOCKS = 13, 5, 2, 8, 4


class Block(nn.Module):
    """A residual block that takes, for each micro-batch, a factor whose first dimension is not the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x)) * factor.sum()


class Piece(nn.Module):
    """Some of the model's parts, in order; counts its forwards."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.forwards = 0

    def forward(self, x: Tensor, factor: Tensor) -> Tensor:
        self.forwards += 1
        for part in self.parts:
            x = part(x, factor) if isinstance(part, Block) else part(x)
        return x


class OwnSchedule(PipelineScheduleSingle):
    """All forwards, then all backwards, in no list of actions: as a user would write it."""

    def _step_microbatches(
        self,
        arg_mbs: Any = None,
        kwarg_mbs: Any = None,
        target_mbs: Any = None,
        losses: Any = None,
        return_outputs: bool = True,
        loss_kwargs: Any = None,
    ) -> None:
        stage: Any = self._stage
        count = self._n_microbatches
        self._initialize_stage(arg_mbs[0], kwarg_mbs[0], target_mbs[0], loss_kwargs)
        sent: list[Any] = []
        for index in range(count):
            _wait_batch_p2p(_batch_p2p(stage.get_fwd_recv_ops(index)))
            output = stage.forward_one_chunk(index, arg_mbs[index], kwarg_mbs[index], return_outputs)
            sent += _batch_p2p(stage.get_fwd_send_ops(index))
            self._maybe_compute_loss(stage, output, target_mbs, index, loss_kwargs)
        for index in range(count):
            _wait_batch_p2p(_batch_p2p(stage.get_bwd_recv_ops(index)))
            stage.backward_one_chunk(index, self._maybe_get_loss(stage, index), True, index == count - 1)
            sent += _batch_p2p(stage.get_bwd_send_ops(index))
        _wait_batch_p2p(sent)
        self._update_losses(stage, losses)


class PlacedSchedule(_PipelineScheduleRuntime):
    """All forwards, then all backwards, of two stages on each rank, as a user would write it."""

    def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any = None, **options: Any) -> None:
        super().__init__(stages, n_microbatches, loss_fn=loss_fn, **options)
        actions = {
            rank: [
                _Action.from_str(f"{stage}{kind}{m}")
                for kind, order in (("F", held), ("B", held[::-1]))
                for stage in order
                for m in range(n_microbatches)
            ]
            for rank in range(self.pp_group_size)
            for held in [self.held(rank, self.pp_group_size)]
        }
        set_schedule_actions(self, actions)

    @staticmethod
    def held(rank: int, size: int) -> tuple[int, ...]:
        """Stages of a rank, in a V."""
        return rank, 2 * size - 1 - rank


class UnbalancedSchedule(PlacedSchedule):
    """The last rank has one stage, and the first rank all others."""

    @staticmethod
    def held(rank: int, size: int) -> tuple[int, ...]:
        return (2 * size - 1,) if rank == size - 1 else tuple(range(2 * size - 1)) if rank == 0 else ()


class VOfMulti(PipelineScheduleMulti):
    """A V on the base class that only sends to other ranks."""

    def __init__(self, stages: Any, n_microbatches: int, loss_fn: Any = None, **options: Any) -> None:
        super().__init__(stages, n_microbatches, loss_fn=loss_fn, **options)
        size = self.pp_group_size
        self.pipeline_order = {
            rank: [_Action.from_str(f"{stage}{kind}0") for kind in "FB" for stage in (rank, 2 * size - 1 - rank)]
            for rank in range(size)
        }


def make_pieces(num_stages: int, *, views: bool = False) -> list[Piece]:
    """The model from one seed, cut into stages; the same values for any number of them.

    Args:
        num_stages: 2 or 4.
        views: whether stages end in a linear layer, whose output is a view.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        embedding, *blocks = nn.Embedding(TOKENS, WIDTH), *(Block() for _ in range(BLOCKS))
        head = nn.Linear(WIDTH, TOKENS)
        ends = [nn.Linear(WIDTH, WIDTH) for _ in range(num_stages - 1)]
    each = BLOCKS // num_stages
    parts: list[list[nn.Module]] = [list(blocks[i * each : (i + 1) * each]) for i in range(num_stages)]
    parts[0].insert(0, embedding)
    parts[-1].append(head)
    if views:
        for part, end in zip(parts, ends, strict=False):
            part.append(end)
    return [Piece(part) for part in parts]


def make_batch(num_microbatches: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Arguments, keywords and targets of each micro-batch."""
    generator = torch.Generator().manual_seed(num_microbatches)
    ids = torch.randint(TOKENS, (num_microbatches, ROWS, LENGTH + 1), generator=generator)
    factors = [{"factor": torch.rand(3, generator=generator)} for _ in range(num_microbatches)]
    return [(one[:, :-1],) for one in ids], factors, [one[:, 1:] for one in ids]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def make_stages(
    spec: ScheduleSpec,
    rank: int,
    pieces: Sequence[nn.Module],
    *,
    train: bool = True,
    events: list[Bar] | None = None,
    recording: Callable[[], bool] = lambda: True,
) -> list[TimedStage]:
    """This rank's stages of two ranks, with static shapes."""
    num_stages = len(pieces)

    def hidden(width: int) -> Tensor:
        return torch.empty(ROWS, LENGTH, width, device="meta", requires_grad=train)

    return [
        TimedStage(
            pieces[index],
            index,
            num_stages,
            torch.device("cpu"),
            input_args=hidden(WIDTH) if index else torch.empty(ROWS, LENGTH, dtype=torch.long, device="meta"),
            output_args=hidden(TOKENS if index == num_stages - 1 else WIDTH),
            events=[] if events is None else events,
            recording=recording,
        )
        for index in stages_of_rank(spec, rank, 2, num_stages // 2)
    ]


def gradients_of(piece: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in piece.named_parameters() if parameter.grad is not None}


def run_whole(
    pieces: Sequence[Piece], num_microbatches: int, order: Mapping[int, Sequence[int]]
) -> tuple[list[Tensor], list[Tensor], list[dict[str, Tensor]]]:
    """One device: losses, outputs, and gradients accumulated over micro-batches, for each stage in its own order."""
    args, kwargs, targets = make_batch(num_microbatches)
    losses, outputs, each = [], [], []
    for index in range(num_microbatches):
        x = args[index][0]
        for piece in pieces:
            piece.zero_grad()
            x = piece(x, **kwargs[index])
        loss = loss_of(x, targets[index])
        loss.backward()
        losses.append(loss.detach())
        outputs.append(x.detach())
        each.append([gradients_of(piece) for piece in pieces])
    summed = []
    for stage in range(len(pieces)):
        total: dict[str, Tensor] = {}
        for index in order[stage]:
            for name, gradient in each[index][stage].items():
                total[name] = total[name] + gradient if name in total else gradient
        summed.append(total)
    return losses, outputs, summed


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def backward_order(actions: Actions, stage_index: int) -> list[int]:
    """The micro-batches in the order in which a stage adds their gradients to its parameters.

    Floating-point sums depend on it: on the CPU, one device that adds up the gradients of the same micro-batches in
    this order has those of the pipeline, to the bit. It is descending for LoopedBFS, ascending for PyTorch's others.
    """
    adds = (_ComputationType.FULL_BACKWARD, _ComputationType.BACKWARD_WEIGHT)
    return [
        action.microbatch_index
        for row in actions.values()
        for action in row
        if action.stage_index == stage_index and action.computation_type in adds and action.microbatch_index is not None
    ]


def stage_of(bar: Bar) -> int:
    """The stage of work on a micro-batch."""
    assert bar.stage is not None
    return bar.stage
