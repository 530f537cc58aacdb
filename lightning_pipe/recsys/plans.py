"""The recsys plans by name: the same tasks, run serially, with input dist ahead, with prefetch ahead."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from lightning_pipe.engine import PipelinePlan, PipelineTask, PlanError, TaskSchedule
from lightning_pipe.engine.plan import MAIN
from lightning_pipe.engine.plan_file import read_plan_file
from lightning_pipe.recsys.balancing_plan import BALANCING, balancing_schedule, with_balancing, yaml_with_balancing

_STEP = ("DenseForward", "LossPostprocess", "DenseBackward", "EmbBackward", "FinalizeGrads", "OptimStep")

PLANS: dict[str, tuple[str, dict[str, TaskSchedule], tuple[str, ...]]] = {
    "serial": ("one batch at a time, every task on the main thread", {}, ()),
    # TorchRec's TrainPipelineSparseDist, step by step.
    "base": (
        "the copy two batches ahead and the input dist one batch ahead",
        {
            "H2DAndShuffle": TaskSchedule(2, "memcpy"),
            "EmbInputDistStart": TaskSchedule(1, "data_dist"),
            "EmbInputDistWait": TaskSchedule(1, "data_dist"),
            "EmbPrefetch": TaskSchedule(0, "data_dist"),
        },
        ("EmbInputDistStart", "H2DAndShuffle", "EmbInputDistWait", "EmbPrefetch", "EmbForward", *_STEP),
    ),
    # NVIDIA's JaggedMegatronPrefetchTrainPipelineSparseDist, step by step: TorchRec's prefetch pipeline with the
    # prefetch in a thread of its own, beside the backward pass.
    "prefetch": (
        "the copy and the input dist two batches ahead, the prefetch one batch ahead in a thread of its own",
        {
            "H2DAndShuffle": TaskSchedule(2, "memcpy"),
            "EmbInputDistStart": TaskSchedule(2, "data_dist"),
            "EmbInputDistWait": TaskSchedule(1, "data_dist"),
            "EmbPrefetch": TaskSchedule(1, "prefetch", thread_group="prefetch"),
        },
        (
            "H2DAndShuffle",
            "EmbInputDistWait",
            "EmbForward",
            "DenseForward",
            "EmbPrefetch",
            *_STEP[1:],
            "EmbInputDistStart",
        ),
    ),
}


# What may have a thread of its own: it waits, and submits nothing. The others submit to process groups, which two
# threads may not use in turn, or run what users wrote, which draws random numbers and expects the main thread.
ON_WORKERS = frozenset({"EmbPrefetch"})


def recsys_plan(plan: str | Path | PipelinePlan, tasks: Sequence[PipelineTask]) -> PipelinePlan:
    """The plan called *plan*, over *tasks*.

    Args:
        plan: a name (``serial``, ``base``, ``prefetch``), the path of a plan in YAML, or a plan, of which the schedule
            is taken.
        tasks: the recsys tasks, in serial order (:func:`~lightning_pipe.recsys.tasks.recsys_tasks`). If those of a
            balancer are among them, plans that do not name these have them as far ahead as the copy; if not, plans that
            name them do without.

    Raises:
        PlanError: neither a known name nor a file, or a plan that these tasks cannot run under.
    """
    found = _find(plan, tasks)
    for task, where in found.schedule.items():
        if where.thread_group != MAIN and task not in ON_WORKERS:
            raise PlanError(
                f"plan {found.name!r} gives task {task!r} to the thread group {where.thread_group!r}; it submits to"
                f" process groups or runs users' code, which is the main thread's: give it thread_group {MAIN!r}. Of"
                f" the recsys tasks {', '.join(sorted(ON_WORKERS))} can have a thread of its own"
            )
    return found


# What an evaluation runs of them.
_EVALUATION = ("H2DAndShuffle", "EmbInputDistStart", "EmbInputDistWait", "EmbPrefetch", "EmbForward", "DenseForward")


def evaluation_plan(training: PipelinePlan, tasks: Sequence[PipelineTask]) -> PipelinePlan:
    """The plan in which a model is evaluated that is trained under *training*: its tasks up to ``DenseForward``.

    That one comes last in a period, for all that is begun before it to go on beside it: there is no backward pass.

    Args:
        training: the plan of training, which says how far ahead each task runs, and where.
        tasks: the recsys tasks, in serial order.
    """
    kept = [(task, training.schedule[task.name]) for task in tasks if task.name in _EVALUATION]
    order = [task for task in training.order if task in _EVALUATION and task != "DenseForward"]
    edges = [
        (one.upstream, one.downstream, one.distance)
        for one in (*training.deps, *training.cross_iter_deps)
        if one.upstream in _EVALUATION and one.downstream in _EVALUATION and one.upstream != "DenseForward"
    ]
    return PipelinePlan(
        kept,
        deps=[edge[:2] for edge in edges if not edge[2]],
        cross_iter_deps=[edge for edge in edges if edge[2]],
        name=f"{training.name}_evaluation",
        order=[*order, "DenseForward"],
    )


def _find(plan: str | Path | PipelinePlan, tasks: Sequence[PipelineTask]) -> PipelinePlan:
    if isinstance(plan, PipelinePlan):
        return _from_yaml(plan.to_yaml(), tasks)
    if isinstance(plan, str) and plan in PLANS:
        name = plan
        _, schedule, order = PLANS[name]
        default = TaskSchedule()
        # Where EmbBackward is the last task (recsys_tasks(scaled_late=True)), it follows OptimStep in the period too.
        if tasks[-1].name == "EmbBackward" and order:
            rest = [task for task in order if task != "EmbBackward"]
            order = (*_insert_after(rest, "OptimStep", "EmbBackward"),)
        if order and _balanced(tasks):
            copy, input_dist = schedule["H2DAndShuffle"], schedule["EmbInputDistStart"]
            schedule = {**schedule, **balancing_schedule(copy.stage, input_dist.stream)}
            order = (*with_balancing(order, copy.stage != input_dist.stage),)
        return PipelinePlan([(task, schedule.get(task.name, default)) for task in tasks], name=name, order=order)
    return _from_yaml(read_plan_file(plan, PLANS, "prefetch"), tasks)


def _balanced(tasks: Sequence[PipelineTask]) -> bool:
    return any(task.name in BALANCING for task in tasks)


def _from_yaml(text: str, tasks: Sequence[PipelineTask]) -> PipelinePlan:
    return PipelinePlan.from_yaml(_for_tasks(text, tasks), tasks)


def _for_tasks(text: str, tasks: Sequence[PipelineTask]) -> str:
    """The plan for just these tasks. Anything wrong with it stays for its reader."""
    try:
        plan = yaml.compose(text, yaml.SafeLoader)
    except yaml.YAMLError:
        return text
    if not isinstance(plan, yaml.MappingNode):
        return text
    yaml_with_balancing(plan, _balanced(tasks))
    if tasks[-1].name == "EmbBackward":
        _move_backward(plan)
    return str(yaml.serialize(plan))


def _move_backward(plan: yaml.MappingNode) -> None:
    """``EmbBackward`` after ``OptimStep`` in the order."""
    for key, value in plan.value:
        if key.value == "order" and isinstance(value, yaml.SequenceNode):
            backward = [task for task in value.value if task.value == "EmbBackward"]
            steps = [task for task in value.value if task.value == "OptimStep"]
            if len(backward) == len(steps) == 1 and value.value.index(backward[0]) < value.value.index(steps[0]):
                value.value.remove(backward[0])
                value.value.insert(value.value.index(steps[0]) + 1, backward[0])


def _insert_after(order: list[str], anchor: str, task: str) -> list[str]:
    position = order.index(anchor) + 1
    return [*order[:position], task, *order[position:]]
