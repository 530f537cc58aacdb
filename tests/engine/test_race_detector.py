"""Faults that are planted in small pipelines and must be found, and correct ones in which nothing must be found."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, State, SWPipeline, TaskSchedule
from lightning_pipe.engine.runtime.devices import DeviceStreams
from lightning_pipe.engine.runtime.executor import Operation
from lightning_pipe.engine.runtime.record_use import record_use
from tests.engine.device_tensors import Accelerator, left_out, watched
from tests.engine.findings import Finding
from tests.patience import HANG

CUDA = torch.device("cuda")
Function = Callable[[IterContext], None]


def copy(ctx: Any) -> None:
    ctx.x = ctx.batch.to(CUDA, non_blocking=True)


def train(ctx: Any) -> None:
    record_use(ctx.x)
    ctx.y = ctx.x * 2
    del ctx.x


def plan(copy: Function = copy, train: Function = train, group: str = "main") -> PipelinePlan:
    """A copy ahead on a stream of its own, and a step that uses and frees what was copied."""
    return PipelinePlan(
        [
            (
                PipelineTask("copy", copy, reads=["batch"], writes=["x"]),
                TaskSchedule(stage=1, stream="memcpy", thread_group=group),
            ),
            (PipelineTask("train", train, reads=["x"], writes=["x", "y", State("model")]), TaskSchedule()),
        ]
    )


def run(plan: PipelinePlan, count: int = 4, feed: Callable[[Accelerator], Iterator[Any]] | None = None) -> Accelerator:
    with watched() as accelerator:
        batches = [torch.ones(4) for _ in range(count)]
        data = iter(accelerator.on_host(batches)) if feed is None else feed(accelerator)
        with SWPipeline(plan, CUDA) as pipeline, suppress(StopIteration):
            while True:
                pipeline.progress(data)
    return accelerator


def kinds(accelerator: Accelerator) -> set[tuple[str, str, str]]:
    """Kind of each finding, and the tasks of both sides."""
    return {(one.kind, one.first.task, one.second.task) for one in accelerator.findings}


# ---------------------------------------------------------------------- nothing to find


@pytest.mark.parametrize("group", ["main", "worker"])
def test_nothing_is_found_in_a_copy_that_the_step_waits_for_and_records(group: str) -> None:
    accelerator = run(plan(group=group))
    assert accelerator.findings == []
    assert accelerator.handler.seq_num >= 8
    assert accelerator.syncs == []


def test_a_backward_is_ordered_as_autograd_orders_the_streams_of_a_gpu() -> None:
    weight = torch.ones(4, requires_grad=True)

    def ahead(ctx: Any) -> None:
        ctx.x = weight * ctx.batch.to(CUDA, non_blocking=True)

    def step(ctx: Any) -> None:
        record_use(ctx.x)
        ctx.x.sum().backward()
        assert weight.grad is not None
        weight.grad.mul_(2)
        ctx.y = None
        del ctx.x

    assert run(plan(copy=ahead, train=step)).findings == []


# ---------------------------------------------------------------------- planted faults


def test_a_dropped_wait_for_an_event_is_found() -> None:
    with mock.patch.object(DeviceStreams, "current_waits_for", left_out):
        assert ("race", "copy", "train") in kinds(run(plan()))


def test_a_wait_for_an_event_that_is_not_yet_recorded_is_found() -> None:
    """The second phase without the first: the stream waits while the worker has not begun."""
    waited = threading.Event()
    waits_for = DeviceStreams.current_waits_for

    def wait(streams: DeviceStreams, event: Any) -> None:
        waits_for(streams, event)
        waited.set()

    def late(ctx: Any) -> None:
        assert waited.wait(HANG)
        copy(ctx)

    def use(ctx: Any) -> None:
        ctx.y = None

    build = Operation.__init__

    def hasty(operation: Operation, *arguments: Any) -> None:
        build(operation, *arguments)
        operation.cpu_waits = ()

    with (
        mock.patch.object(Operation, "__init__", hasty),
        mock.patch.object(DeviceStreams, "current_waits_for", wait),
    ):
        found = kinds(run(plan(copy=late, train=use, group="worker"), count=1))
    assert ("wait without a record", "", "") in found


def test_memory_that_another_stream_uses_without_record_stream_is_found() -> None:
    def forget(ctx: Any) -> None:
        ctx.y = ctx.x * 2
        del ctx.x

    assert kinds(run(plan(train=forget))) == {("reused too early", "copy", "train")}


def test_a_tensor_that_is_written_on_the_copy_stream_after_it_was_handed_on_is_found() -> None:
    buffer = torch.zeros(4)

    def into_buffer(ctx: Any) -> None:
        ctx.x = buffer.copy_(ctx.batch, non_blocking=True)

    assert ("race", "train", "copy") in kinds(run(plan(copy=into_buffer)))


def test_a_host_read_on_a_workers_stream_is_listed() -> None:
    def read(ctx: Any) -> None:
        copy(ctx)
        assert ctx.x.sum().item() == 4

    accelerator = run(plan(copy=read, group="worker"))
    assert [(one.site.task, one.operator) for one in accelerator.syncs] == [("copy", "_local_scalar_dense")] * 4
    assert {one.stream for one in accelerator.syncs}.isdisjoint({"default"})
    assert accelerator.findings == []


@pytest.fixture
def world(tmp_path: Path) -> None:
    """A process group of this process alone. The suite destroys it."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)


def reduced(between: Callable[[Tensor, Any], Any]) -> list[Finding]:
    with watched() as accelerator:
        tensor = torch.ones(4, device=CUDA)
        work = dist.all_reduce(tensor, async_op=True)
        between(tensor, work)
        return accelerator.findings


@pytest.mark.usefixtures("world")
def test_the_result_of_a_collective_that_is_not_waited_for_is_found() -> None:
    (found,) = reduced(lambda tensor, work: tensor + 1)
    assert found.kind == "race"
    assert "allreduce_ is writing" in found.what


@pytest.mark.usefixtures("world")
def test_a_message_that_is_overwritten_while_it_is_sent_is_found() -> None:
    with watched() as accelerator:
        sent, received = torch.ones(4, device=CUDA), torch.zeros(4, device=CUDA)
        work = dist.all_to_all_single(received, sent, async_op=True)
        sent.zero_()
        assert work is not None
        work.wait()
        (found,) = accelerator.findings
    assert "alltoall_base_ is reading from what aten::zero_ is writing" in found.what


def test_the_fake_device_is_gone_afterwards() -> None:
    before = torch.cuda.Stream, torch.from_numpy, Tensor.record_stream, dist.Work.wait
    with ExitStack() as stack:
        stack.enter_context(watched())
        assert torch.ones(1, device=CUDA).device == torch.device("cuda", 0)
    assert before == (torch.cuda.Stream, torch.from_numpy, Tensor.record_stream, dist.Work.wait)
    assert torch.ones(1).device.type == "cpu"
