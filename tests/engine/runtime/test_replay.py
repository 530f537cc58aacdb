"""A task that is replayed leaves what it left when it was captured, and its function is not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_pipe.engine import (
    DeclaredIO,
    IterContext,
    PipelinePlan,
    PipelineTask,
    PlanError,
    State,
    SWPipeline,
    TaskSchedule,
)

Run = Callable[[IterContext], None]


class Counted:
    """A function, and how often it was run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.runs = 0

    def __call__(self, ctx: IterContext) -> None:
        self.runs += 1
        self._run(ctx)


def pipeline_of(*tasks: PipelineTask, **schedules: TaskSchedule) -> SWPipeline:
    plan = PipelinePlan({task: schedules.get(task.name, TaskSchedule()) for task in tasks})
    return SWPipeline(plan)


def trained(pipeline: SWPipeline, count: int, batches: Any = None) -> list[IterContext]:
    batches = iter(range(100)) if batches is None else batches
    return [pipeline.progress(batches) for _ in range(count)]


def test_a_task_runs_once_more_and_is_then_replayed() -> None:
    def fill(ctx: IterContext) -> None:
        ctx.found = [torch.full((2,), float(ctx.batch))]
        ctx.batch = ctx.batch * 10

    task = Counted(fill)
    pipeline = pipeline_of(PipelineTask("fill", task, reads=["batch"], writes=["batch", "found"]))
    batches = iter(range(1, 20))
    trained(pipeline, 2, batches)
    pipeline.enable_shortcut("fill")
    assert pipeline.shortcut_tasks == ("fill",)
    contexts = trained(pipeline, 3, batches)
    assert task.runs == 3
    assert [(ctx.batch, ctx.found[0].tolist()) for ctx in contexts] == [(30, [3.0, 3.0])] * 3
    assert [ctx.iter_idx for ctx in contexts] == [2, 3, 4]
    pipeline.disable_shortcut()
    (ctx,) = trained(pipeline, 1, batches)
    assert (ctx.batch, task.runs) == (60, 4)
    assert not pipeline.shortcut_tasks


def test_a_replayed_task_is_not_begun_by_the_caller() -> None:
    with pipeline_of(PipelineTask("Step", lambda ctx: None)) as pipeline:
        pipeline.enable_shortcut("Step")
        pipeline.begin_period(repeat(None))
        with pytest.raises(PlanError, match=r"'Step' is replayed and cannot be begun; call disable_shortcut\('Step'\)"):
            pipeline.begin_caller_task("Step")


def test_what_the_task_deletes_is_deleted_again_and_what_others_change_is_not_seen() -> None:
    def produce(ctx: IterContext) -> None:
        ctx.raw = torch.ones(2)

    def consume(ctx: IterContext) -> None:
        ctx.cooked = ctx.raw + 1
        del ctx.raw

    def spoil(ctx: IterContext) -> None:
        ctx.cooked.mul_(100)

    pipeline = pipeline_of(
        PipelineTask("produce", produce, writes=["raw"]),
        PipelineTask("consume", consume, reads=["raw"], writes=["raw", "cooked"]),
        PipelineTask("spoil", spoil, reads=["cooked"], writes=["cooked"]),
    )
    pipeline.enable_shortcut("consume")
    for ctx in trained(pipeline, 4):
        assert not hasattr(ctx, "raw")
        assert ctx.cooked.tolist() == [200.0, 200.0]


def test_on_a_worker_a_replay_keeps_its_place_in_the_global_order() -> None:
    order: list[str] = []

    def submit(name: str) -> Run:
        return lambda ctx: order.append(f"{name} {ctx.iter_idx}")

    ahead = TaskSchedule(stage=1, thread_group="one", globally_ordered=True)
    pipeline = pipeline_of(
        PipelineTask("first", submit("first"), writes=["a"]),
        PipelineTask("second", submit("second"), writes=["b"]),
        first=ahead,
        second=TaskSchedule(stage=1, thread_group="two", globally_ordered=True),
    )
    with pipeline:
        trained(pipeline, 2)
        pipeline.enable_shortcut("first")
        trained(pipeline, 4)
    # Iterations 0 to 2 had begun before, and 3 is captured.
    before = [f"{name} {iteration}" for iteration in range(4) for name in ("first", "second")]
    assert order == [*before, "second 4", "second 5", "second 6"]


# ---------------------------------------------------------------------- gradients


class Net:
    """Two layers, each a task, and a loss."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.below, self.above = nn.Linear(3, 4), nn.Linear(4, 1)
        self.input = torch.ones(2, 3)

    def pipeline(self, **io: DeclaredIO) -> SWPipeline:
        def below(ctx: IterContext) -> None:
            ctx.hidden = {"deep": [self.below(self.input)]}

        def above(ctx: IterContext) -> None:
            ctx.loss = self.above(ctx.hidden["deep"][0]).sum()

        def backward(ctx: IterContext) -> None:
            for parameter in self.parameters():
                parameter.grad = None
            ctx.loss.backward()

        return pipeline_of(
            PipelineTask("below", below, [io["below"]] if "below" in io else (), writes=["hidden"]),
            PipelineTask("above", above, reads=["hidden"], writes=["loss"]),
            PipelineTask("backward", backward, reads=["loss"], writes=[State("gradients")]),
        )

    def parameters(self) -> list[nn.Parameter]:
        return [*self.below.parameters(), *self.above.parameters()]

    def gradients(self) -> list[Tensor | None]:
        return [None if parameter.grad is None else parameter.grad.clone() for parameter in self.parameters()]


def test_gradients_end_at_a_replayed_task_and_upstream_of_it_are_zeros() -> None:
    net = Net()
    pipeline = net.pipeline()
    trained(pipeline, 1)
    normal = net.gradients()
    pipeline.enable_shortcut("above")
    loss = trained(pipeline, 2)[1].loss
    found = net.gradients()
    assert loss.item() == trained(pipeline, 1)[0].loss.item()
    assert [None if one is None else one.abs().sum().item() for one in found] == [0.0, 0.0, None, None]
    pipeline.disable_shortcut()
    trained(pipeline, 1)
    assert all(torch.equal(one, other) for one, other in zip(net.gradients(), normal, strict=True))  # type: ignore[arg-type]


def test_parameters_that_a_task_names_take_part_in_backward_with_zeros() -> None:
    net = Net()
    pipeline = net.pipeline(
        below=DeclaredIO(lambda ctx: None, lambda ctx, _: None, upstream=lambda ctx: net.below.parameters())
    )
    trained(pipeline, 1)
    normal = net.gradients()
    pipeline.enable_shortcut("below")
    trained(pipeline, 2)
    below, above = net.gradients()[:2], net.gradients()[2:]
    assert [one.abs().sum().item() for one in below if one is not None] == [0.0, 0.0]
    assert all(torch.equal(one, other) for one, other in zip(above, normal[2:], strict=True))  # type: ignore[arg-type]


# ---------------------------------------------------------------------- effects


def test_an_effect_outside_the_context_is_restored_for_who_comes_later() -> None:
    shelf: dict[str, Tensor] = {}

    def put(ctx: IterContext) -> None:
        shelf["box"] = torch.tensor([float(ctx.batch)])

    def take(ctx: IterContext) -> None:
        ctx.found = shelf.pop("box").item()

    restores: list[int] = []

    def restore(ctx: IterContext, kept: Any) -> None:
        restores.append(ctx.iter_idx)
        shelf["box"] = kept

    io = DeclaredIO(lambda ctx: shelf["box"], restore)
    shelf_state = State("shelf")
    pipeline = pipeline_of(
        PipelineTask("put", put, [io], reads=["batch"], writes=[shelf_state]),
        PipelineTask("take", take, reads=[shelf_state], writes=["found"]),
    )
    pipeline.enable_shortcut("put")
    assert [ctx.found for ctx in trained(pipeline, 3, iter([7, 8, 9]))] == [7.0] * 3
    assert restores == [1, 2]


# ---------------------------------------------------------------------- what is refused


def test_an_unknown_task_a_task_that_cannot_be_replayed_and_an_open_period_are_refused() -> None:
    tasks = (
        PipelineTask("step", lambda ctx: None, not_replayable="its neighbors would wait for what it sends"),
        PipelineTask("other", lambda ctx: None),
    )
    pipeline = pipeline_of(*tasks)
    with pytest.raises(PlanError, match="no task 'stop'; its tasks are step, other"):
        pipeline.enable_shortcut("stop")
    with pytest.raises(PlanError, match="'step' cannot be replayed, since its neighbors would wait"):
        pipeline.enable_shortcut("other", "step")
    assert pipeline.shortcut_tasks == ()
    with pytest.raises(PlanError, match="no task 'stop'"):
        pipeline.disable_shortcut("stop")
    batches: Iterator[int] = repeat(0)
    pipeline.begin_period(batches)
    with pytest.raises(PlanError, match="is open"):
        pipeline.enable_shortcut("other")
