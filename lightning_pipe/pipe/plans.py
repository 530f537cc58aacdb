"""Schedules of a pipe ("1F1B", GPipe) as plans: an iteration is a micro-batch, a thread group is a partition.

GPipe's forward with two partitions and four micro-batches; its backward is the mirror image::

    partition 0   F0 F1 F2 F3
    partition 1      F0 F1 F2 F3

1F1B with three partitions: after the warm-up, each partition alternates one forward and one backward, so that partition
j of n holds at most n - j micro-batches, independent of their number::

    partition 0   F0 F1 F2 .. .. B0 F3 B1 F4 B2
    partition 1      F0 F1 .. B0 F2 B1 F3 B2
    partition 2         F0 B0 F1 B1 F2 B2 F3 ...

The stage of every task is one higher than necessary, so that threads have queued work while the calling thread retires
a micro-batch. The order of tasks in each thread does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, TaskSchedule
from lightning_pipe.pipe.skip import SkipRoute

# Function of a task, called with the index of the partition and the context.
TaskFunction = Callable[[int, IterContext], None]

_GRAPH = "backward needs the autograd graph of its own micro-batch"


def build_gpipe_and_1f1b_plans(
    partitions: int, routes: Sequence[SkipRoute], forward: TaskFunction, recompute: TaskFunction, backward: TaskFunction
) -> list[PipelinePlan]:
    """Plans of all forwards in GPipe's clock cycles, of all backwards, and of both in turn (1F1B)."""
    clocked, in_turn, backwards = [], [], []
    for index in range(partitions):
        task = _make_forward_task(index, routes, forward)
        clocked.append((task, _assign_stage_and_thread_group(index, partitions - index)))
        in_turn.append((task, _assign_stage_and_thread_group(index, partitions)))
    for index in reversed(range(partitions)):
        # As late as possible, so that a partition holds the recomputed activations of one micro-batch at a time. It
        # recomputes while the next partition runs backward.
        where = _assign_stage_and_thread_group(index, index + 1)
        backwards += [
            (_make_recompute_task(index, recompute), where),
            (_make_backward_task(index, routes, backward), where),
        ]
    tasks = {"gpipe_forward": clocked, "gpipe_backward": backwards, "1f1b": in_turn + backwards}
    return [PipelinePlan(placed, name=name) for name, placed in tasks.items()]


def _assign_stage_and_thread_group(partition: int, stage: int) -> TaskSchedule:
    return TaskSchedule(stage=stage, thread_group=f"partition{partition}")


def _make_forward_task(index: int, routes: Sequence[SkipRoute], fn: TaskFunction) -> PipelineTask:
    skips_in = [get_skip_tensor_field_name(number) for number, route in enumerate(routes) if route.target == index]
    skips_out = [get_skip_tensor_field_name(number) for number, route in enumerate(routes) if route.source == index]
    return PipelineTask(
        f"Forward{index}",
        lambda ctx: fn(index, ctx),
        reads=["batch", get_input_field_name(index), *skips_in],
        writes=[get_input_field_name(index), get_input_field_name(index + 1), f"graph{index}", *skips_in, *skips_out],
        not_replayable=_GRAPH,
    )


def _make_recompute_task(index: int, fn: TaskFunction) -> PipelineTask:
    return PipelineTask(
        f"Recompute{index}",
        lambda ctx: fn(index, ctx),
        reads=["batch"],
        writes=[f"graph{index}"],
        not_replayable=_GRAPH,
    )


def _make_backward_task(index: int, routes: Sequence[SkipRoute], fn: TaskFunction) -> PipelineTask:
    skips_in = [
        get_skip_tensor_gradient_field_name(number) for number, route in enumerate(routes) if route.source == index
    ]
    skips_out = [
        get_skip_tensor_gradient_field_name(number) for number, route in enumerate(routes) if route.target == index
    ]
    return PipelineTask(
        f"Backward{index}",
        lambda ctx: fn(index, ctx),
        reads=["batch", f"graph{index}", get_input_gradient_field_name(index + 1), *skips_in],
        writes=[get_input_gradient_field_name(index + 1), get_input_gradient_field_name(index), *skips_in, *skips_out],
        not_replayable=_GRAPH,
    )


def parse_task_name(task: str) -> tuple[str, int]:
    """Return kind and partition of a task: ``("Forward", 0)``, ``("Recompute", 2)`` or ``("Backward", 1)``."""
    kind = task.rstrip("0123456789")
    return kind, int(task.removeprefix(kind))


def get_input_field_name(partition: int) -> str:
    """Context field of the input of a partition."""
    return f"value{partition}"


def get_input_gradient_field_name(partition: int) -> str:
    """Context field of the gradient of a partition's input."""
    return f"gradient{partition}"


def get_skip_tensor_field_name(route: int) -> str:
    """Context field of the value of a skip."""
    return f"skip{route}"


def get_skip_tensor_gradient_field_name(route: int) -> str:
    """Context field of the gradient of a skip."""
    return f"skip_gradient{route}"
