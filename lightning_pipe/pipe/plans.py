"""The schedules of a pipe ("1F1B", GPipe) as plans: an iteration is a micro-batch, a thread group a partition.

GPipe's forward, two partitions and four micro-batches; its backward is the mirror image::

    partition 0   F0 F1 F2 F3
    partition 1      F0 F1 F2 F3

1F1B, with three partitions: after the warm-up a partition runs one forward, then one backward, so that partition j of
n keeps n - j micro-batches, however many there are::

    partition 0   F0 F1 F2 .. .. B0 F3 B1 F4 B2
    partition 1      F0 F1 .. B0 F2 B1 F3 B2
    partition 2         F0 B0 F1 B1 F2 B2 F3 ...

Every task has a stage one higher than it needs, so that threads have something in their queues while the calling thread
retires a micro-batch. The order of what a thread does is the same.

Tested in ``tests/pipe/test_scheduler.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, TaskSchedule
from lightning_pipe.pipe.skip import SkipRoute

__all__ = ["TaskFunction", "backward_plan", "forward_plan", "one_forward_one_backward_plan", "work_of"]

# A task's function, for a partition.
TaskFunction = Callable[[int, IterContext], None]

_GRAPH = "its graph, which backward needs, would be that of another micro-batch"


def forward_plan(partitions: int, routes: Sequence[SkipRoute], forward: TaskFunction) -> PipelinePlan:
    """All forwards, in GPipe's clock cycles."""
    tasks = [(_forward(index, routes, forward), _where(index, partitions - index)) for index in range(partitions)]
    return PipelinePlan(tasks, name="gpipe_forward")


def backward_plan(
    partitions: int, routes: Sequence[SkipRoute], recompute: TaskFunction, backward: TaskFunction
) -> PipelinePlan:
    """All backwards, the last partition first. A partition recomputes while the next one is at the gradient."""
    tasks = []
    for index in reversed(range(partitions)):
        # As late as can be: of what is recomputed a partition holds one micro-batch at a time.
        tasks.append((_recompute(index, recompute), _where(index, index + 1)))
        tasks.append((_backward(index, routes, backward), _where(index, index + 1)))
    return PipelinePlan(tasks, name="gpipe_backward")


def one_forward_one_backward_plan(
    partitions: int, routes: Sequence[SkipRoute], forward: TaskFunction, recompute: TaskFunction, backward: TaskFunction
) -> PipelinePlan:
    """Forwards and backwards in turns."""
    tasks = [(_forward(index, routes, forward), _where(index, partitions)) for index in range(partitions)]
    for index in reversed(range(partitions)):
        tasks.append((_recompute(index, recompute), _where(index, index + 1)))
        tasks.append((_backward(index, routes, backward), _where(index, index + 1)))
    return PipelinePlan(tasks, name="1f1b")


def _where(partition: int, stage: int) -> TaskSchedule:
    return TaskSchedule(stage=stage, thread_group=f"partition{partition}")


def _forward(index: int, routes: Sequence[SkipRoute], fn: TaskFunction) -> PipelineTask:
    skips_in = [skip_field(number) for number, route in enumerate(routes) if route.target == index]
    skips_out = [skip_field(number) for number, route in enumerate(routes) if route.source == index]
    return PipelineTask(
        f"Forward{index}",
        lambda ctx: fn(index, ctx),
        reads=["batch", value_field(index), *skips_in],
        writes=[value_field(index), value_field(index + 1), f"graph{index}", *skips_in, *skips_out],
        not_replayable=_GRAPH,
    )


def _recompute(index: int, fn: TaskFunction) -> PipelineTask:
    return PipelineTask(
        f"Recompute{index}",
        lambda ctx: fn(index, ctx),
        reads=["batch"],
        writes=[f"graph{index}"],
        not_replayable=_GRAPH,
    )


def _backward(index: int, routes: Sequence[SkipRoute], fn: TaskFunction) -> PipelineTask:
    skips_in = [skip_gradient_field(number) for number, route in enumerate(routes) if route.source == index]
    skips_out = [skip_gradient_field(number) for number, route in enumerate(routes) if route.target == index]
    return PipelineTask(
        f"Backward{index}",
        lambda ctx: fn(index, ctx),
        reads=["batch", f"graph{index}", gradient_field(index + 1), *skips_in],
        writes=[gradient_field(index + 1), gradient_field(index), *skips_in, *skips_out],
        not_replayable=_GRAPH,
    )


def work_of(task: str) -> tuple[str, int]:
    """What a task does, and of which partition: ``("Forward", 0)``, ``("Recompute", 2)`` or ``("Backward", 1)``."""
    what = task.rstrip("0123456789")
    return what, int(task.removeprefix(what))


def value_field(partition: int) -> str:
    """The context's field for what goes into a partition."""
    return f"value{partition}"


def gradient_field(partition: int) -> str:
    """The field for the gradient of that."""
    return f"gradient{partition}"


def skip_field(route: int) -> str:
    """The field for what goes along a skip."""
    return f"skip{route}"


def skip_gradient_field(route: int) -> str:
    """The field for the gradient of that."""
    return f"skip_gradient{route}"
