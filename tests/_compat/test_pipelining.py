"""Contracts with torch.distributed.pipelining, in every version from PyTorch 2.12.

A failure means that PyTorch has changed: look for a public way first, then adapt ``lightning_pipe/_compat/pipelining``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import _Action, _ComputationType

from lightning_pipe._compat.pipelining import forget_output, is_wait, make_detachable, run_microbatches, with_waits

PIECES = [torch.ones(2, 3) * number for number in (1.0, 2.0)]


class ViewOfItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, value: Tensor, *, shift: float) -> Tensor:
        return (value * self.weight + shift).view(3, 2)


@pytest.fixture
def stage() -> PipelineStage:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    given, result = torch.empty(2, 3, device="meta"), torch.empty(3, 2, device="meta", requires_grad=True)
    return PipelineStage(ViewOfItsInput(), 0, 1, torch.device("cpu"), input_args=given, output_args=result)


def test_a_step_takes_micro_batches_as_they_are(stage: PipelineStage) -> None:
    seen: list[Any] = []

    def loss_of(output: Tensor, target: Any) -> Tensor:
        seen.append(target)
        return output.sum()

    schedule = ScheduleGPipe(stage, 2, loss_of, scale_grads=False)
    losses: list[Tensor] = []
    keywords = [{"shift": 0.0}, {"shift": 1.0}]  # a number, which PyTorch would not know how to cut
    run_microbatches(schedule, [stage], [(one,) for one in PIECES], keywords, ["a", "b"], losses)
    assert [float(loss.detach()) for loss in losses] == [12.0, 30.0]
    assert seen == ["a", "b"]
    assert float(stage.submod.weight.grad) == 18.0  # type: ignore[arg-type]
    assert not stage.output_chunks


def test_what_a_stage_holds_can_be_made_detachable_and_forgotten(stage: PipelineStage) -> None:
    stage.has_backward = True
    schedule = ScheduleGPipe(stage, 2, lambda output, target: output.sum())
    schedule._initialize_stage((PIECES[0],), {"shift": 0.0})
    output = stage.forward_one_chunk(0, (PIECES[0],), {"shift": 0.0}, False)
    assert output._is_view()
    with pytest.raises(RuntimeError, match="detach"):
        output.detach_()
    make_detachable(stage, 0)
    states: Any = getattr(stage, "fwd_cache", None) or getattr(stage, "_forward_chunk_states", None)
    held = states[0][0] if isinstance(states[0], tuple) else states[0].live_outputs
    assert [torch.equal(one.detach(), output.detach()) for one in held] == [True]
    for one in held:
        one.detach_()
    forget_output(stage, 0)
    assert not states


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0WAIT_SEND_F1", True), ("12WAIT_SEND_B0", True), ("1WAIT_REDUCE_GRAD", True), ("0SEND_F1", False), ("", False)],
)
def test_waits_are_known_in_every_version(text: str, expected: bool) -> None:
    assert is_wait(text) == expected


def test_each_send_and_reduction_gets_its_wait_where_the_version_has_waits() -> None:
    rows = {
        rank: [_Action.from_str(text) for text in texts]
        for rank, texts in {
            0: ["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0REDUCE_GRAD"],
            1: ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1REDUCE_GRAD"],
        }.items()
    }
    given: Any = rows
    found = {rank: [str(action) for action in row] for rank, row in with_waits(given).items()}
    if hasattr(_ComputationType, "WAIT_SEND_F"):
        assert found[0] == ["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0WAIT_SEND_F0", "0REDUCE_GRAD", "0WAIT_REDUCE_GRAD"]
        assert found[1] == ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1REDUCE_GRAD", "1WAIT_REDUCE_GRAD", "1WAIT_SEND_B0"]
    else:
        assert found == {rank: [str(action) for action in row] for rank, row in rows.items()}
