"""Contracts with torch.distributed.pipelining.

A failure means that PyTorch has changed: look for a public way first, then adapt ``lightning_pipe/_compat/pipelining``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from lightning_pipe._compat.pipelining import copy_view_outputs, release_schedule_tensors, run_microbatches

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
    run_microbatches(schedule, [(one,) for one in PIECES], keywords, ["a", "b"], losses)
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
    copy_view_outputs(stage, 0)
    ((copy,), _) = stage.fwd_cache[0]
    assert torch.equal(copy.detach(), output.detach())
    copy.detach_()
    release_schedule_tensors(schedule)
    assert not stage.fwd_cache
