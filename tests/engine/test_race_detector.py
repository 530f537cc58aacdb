"""Faults that are planted in a small pipeline are found by the tool that the tests of streams use."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lightning_pipe.engine import PipelinePlan, PipelineTask, State, SWPipeline, TaskSchedule
from lightning_pipe.engine.runtime.devices import DeviceStreams
from lightning_pipe.engine.runtime.record_stream import record_stream
from tests.engine.device_tensors import Accelerator, left_out, watched

CUDA = torch.device("cuda")


def copy(ctx: Any) -> None:
    ctx.x = ctx.batch.to(CUDA, non_blocking=True)


def train(ctx: Any) -> None:
    record_stream(ctx.x)
    ctx.y = ctx.x * 2
    del ctx.x


def run(train: Any = train) -> Accelerator:
    """A copy ahead on a stream of its own by a worker, and a step that uses and frees what was copied."""
    plan = PipelinePlan(
        [
            (
                PipelineTask("copy", copy, reads=["batch"], writes=["x"]),
                TaskSchedule(stage=1, stream="memcpy", thread_group="worker"),
            ),
            (PipelineTask("train", train, reads=["x"], writes=["x", "y", State("model")]), TaskSchedule()),
        ]
    )
    with watched() as accelerator:
        data = iter(accelerator.on_host([torch.ones(4) for _ in range(4)]))
        with SWPipeline(plan, CUDA) as pipeline, suppress(StopIteration):
            while True:
                pipeline.progress(data)
    return accelerator


def kinds(accelerator: Accelerator) -> set[tuple[str, str, str]]:
    """Kind of each finding, and the tasks of both sides."""
    return {(one.kind, one.first.task, one.second.task) for one in accelerator.findings}


def test_nothing_is_found_in_a_copy_that_the_step_waits_for_and_records() -> None:
    assert run().findings == []


def test_a_dropped_wait_for_an_event_is_found() -> None:
    with mock.patch.object(DeviceStreams, "wait_event", left_out):
        assert ("race", "copy", "train") in kinds(run())


def test_memory_that_another_stream_uses_without_record_stream_is_found() -> None:
    def forget(ctx: Any) -> None:
        ctx.y = ctx.x * 2
        del ctx.x

    assert kinds(run(forget)) == {("reused too early", "copy", "train")}


def test_the_result_of_a_collective_that_is_not_waited_for_is_found(tmp_path: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    with watched() as accelerator:
        tensor = torch.ones(4, device=CUDA)
        work = dist.all_reduce(tensor, async_op=True)
        _ = tensor + 1
        (found,) = accelerator.findings
        assert work is not None
    assert found.kind == "race"
