"""What ranks hold of the forwards of a step, counted tensor by tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.forward_bytes import ForwardBytes
from lightning_pipe.llm.measure.live_bytes import LiveBytes
from lightning_pipe.llm.schedules.named import SCHEDULES, count_stages, stages_of_rank
from lightning_pipe.llm.schedules.simulation import Kind, actions_of, simulate
from lightning_pipe.llm.schedules.step import build_schedule, run_schedule
from lightning_pipe.llm.schedules.timed_stage import TimedStage
from tests.distributed import run_ranks

ROWS, WIDTH, MICROBATCHES = 4, 32, 8
HIDDEN = 4 * ROWS * WIDTH  # bytes of what stages exchange
INNER = 2 * HIDDEN  # bytes that are kept for the backward
UNIT = INNER + HIDDEN  # bytes of a micro-batch's activations


# ---------------------------------------------------------------------- one process


class Stage(nn.Module):
    """Keeps for the backward its input, which is somebody else's, and what comes out of tanh; and gives its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, result_of: Any = None) -> Tensor:
        return x + self.second(torch.tanh(self.first(x)))


def test_a_storage_counts_once_from_when_it_is_made_until_it_is_gone() -> None:
    before = torch.zeros(100)
    with LiveBytes() as live:
        made = torch.ones(1000)
        assert live.now == 4000
        view, _ = made.view(10, 100)[2:], before.view(10, 10)
        before += 1
        made.mul_(2)
        assert live.now == 4000
        del made
        assert live.now == 4000
        del view
        assert live.now == 0
        assert live.peak == 4000
        kept = torch.ones(5)
    torch.ones(500)
    assert live.now == 20
    del kept
    assert live.now == 0


# ---------------------------------------------------------------------- schedules


def loss_of(output: Tensor, target: Any) -> Tensor:
    return output.sum()


def held(name: str, group: dist.ProcessGroup) -> list[dict[tuple[int, int], int]]:
    """Bytes of each forward that are there at the end of each, on this rank, in a step."""
    spec, ranks = SCHEDULES[name], group.size()
    count = ranks * count_stages(spec, ranks)
    hidden = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
    stages = [
        TimedStage(
            Stage(),
            index,
            count,
            torch.device("cpu"),
            input_args=hidden,
            output_args=hidden,
            group=group,
            events=[],
            recording=lambda: False,
        )
        for index in stages_of_rank(spec, group.rank(), ranks)
    ]
    schedule = build_schedule(spec, stages, MICROBATCHES, loss_of)
    inputs: list[Any] = [(torch.randn(ROWS, WIDTH),) for _ in range(MICROBATCHES)]
    nothing: list[dict[str, Any]] = [{} for _ in inputs]
    run_schedule(schedule, inputs, nothing, list(inputs))
    with ForwardBytes({stage.stage_index: stage.submod for stage in stages}) as live:
        run_schedule(schedule, inputs, nothing, list(inputs))
    return live.after_forwards


Held = dict[tuple[str, int], list[dict[tuple[int, int], int]]]


def all_schedules(rank: int, world_size: int) -> Held:
    pairs: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    whole = dist.group.WORLD
    assert whole is not None
    groups = {2: pairs[rank // 2], 4: whole}
    return {(name, size): held(name, group) for name in SCHEDULES for size, group in groups.items()}


@pytest.fixture(scope="module")
def found() -> list[Held]:
    return run_ranks(all_schedules, 4)


def count_whole(after_forward: dict[tuple[int, int], int]) -> int:
    """Number of micro-batches whose activations are there."""
    assert set(after_forward.values()) <= {HIDDEN, INNER, UNIT}
    return sum(size == UNIT for size in after_forward.values())


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("size", [2, 4])
def test_every_schedule_holds_at_most_what_its_simulation_says(found: list[Held], name: str, size: int) -> None:
    actions = actions_of(SCHEDULES[name], size, MICROBATCHES)
    kinds: tuple[Kind, ...] = ("forward", "backward", "input_backward", "weight_backward")
    timeline = simulate(actions, {(a.stage_index, kind): 1 for row in actions.values() for a in row for kind in kinds})
    for rank in range(size):
        assert max(map(count_whole, found[rank][name, size])) == timeline.peak_live(rank)
