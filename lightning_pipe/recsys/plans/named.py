"""The recsys plans by name: the same tasks, run serially, or with more and more of them ahead.

batches ahead      copy    input dist    rows fetched    looked up    trained on tables
serial             0       0             0               0            of the batch before
base               2       1             0               0            of the batch before
prefetch           2       2, 1          1               0            of the batch before
early_prefetch     2       2, 1          1               0            of the batch before
fused_sparse_dist  2       1             1               1            of the batch before
semi_sync          3       2             1               1            of the batch before that one
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from lightning_pipe.engine import PipelinePlan, PipelineTask, PlanError, State, TaskSchedule
from lightning_pipe.engine.plans.plan import MAIN
from lightning_pipe.engine.plans.plan_file import plan_file
from lightning_pipe.engine.plans.plan_yaml import plan_content
from lightning_pipe.engine.ranks.exchanges import gains_from_messages
from lightning_pipe.recsys.plans.with_balancer import (
    BALANCING,
    balancing_schedule,
    content_with_balancing,
    names_once,
    with_balancing,
)
from lightning_pipe.recsys.plans.with_replicas import (
    AVERAGING,
    content_with_replicas,
    stale_with_replicas,
    with_replicas,
)

_STEP = ("DenseForward", "LossPostprocess", "DenseBackward", "EmbBackward", "FinalizeGrads", "OptimStep")


class NamedPlan(NamedTuple):
    """A plan for the recsys tasks.

    Attributes:
        says: what it does, in a line.
        schedule: of tasks that run ahead, or on a stream or in a thread of their own.
        order: of a period; empty for the serial one.
        stale: dependencies that it gives up.
    """

    says: str
    schedule: dict[str, TaskSchedule]
    order: tuple[str, ...] = ()
    stale: tuple[tuple[str, str], ...] = ()

    @property
    def looks_ahead(self) -> bool:
        """Whether it looks up batches before it is their turn."""
        return self.schedule.get("EmbForward", TaskSchedule()).stage > 0


PLANS: dict[str, NamedPlan] = {
    "serial": NamedPlan("one batch at a time, every task on the main thread", {}),
    # TorchRec's TrainPipelineSparseDist, step by step.
    "base": NamedPlan(
        "the copy two batches ahead and the input dist one batch ahead",
        {
            "H2DAndShuffle": TaskSchedule(2, "memcpy"),
            "EmbInputDistStart": TaskSchedule(1, "data_dist"),
            "EmbInputDistWait": TaskSchedule(1, "data_dist"),
            "EmbPrefetch": TaskSchedule(0, "data_dist"),
        },
        # The next batch's splits travel beside this one's forward pass, its ids beside what follows.
        (
            *("EmbInputDistStart", "H2DAndShuffle", "EmbPrefetch", "EmbForward", "DenseForward", "LossPostprocess"),
            *("EmbInputDistWait", "DenseBackward", "EmbBackward", "FinalizeGrads", "OptimStep"),
        ),
    ),
    # NVIDIA's JaggedMegatronPrefetchTrainPipelineSparseDist, step by step: TorchRec's prefetch pipeline with the
    # prefetch in a thread of its own, beside the backward pass.
    "prefetch": NamedPlan(
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
    # The same with the prefetch in front of the lookup: a whole step to hide behind, for rows that come from a disk.
    "early_prefetch": NamedPlan(
        "as prefetch, which begins in front of the lookup and not behind the forward pass",
        {
            "H2DAndShuffle": TaskSchedule(2, "memcpy"),
            "EmbInputDistStart": TaskSchedule(2, "data_dist"),
            "EmbInputDistWait": TaskSchedule(1, "data_dist"),
            "EmbPrefetch": TaskSchedule(1, "prefetch", thread_group="prefetch"),
        },
        ("H2DAndShuffle", "EmbInputDistWait", "EmbPrefetch", "EmbForward", *_STEP, "EmbInputDistStart"),
    ),
    # TorchRec's TrainPipelineFusedSparseDist: tables are written in the backward of their lookups, so the next batch is
    # looked up beside what is left of this one: its dense gradients' reduction, its optimiser step, its logging.
    "fused_sparse_dist": NamedPlan(
        "the copy two batches ahead, the input dist one, and the lookup too, as soon as the tables are written",
        {
            "H2DAndShuffle": TaskSchedule(2, "memcpy"),
            "EmbInputDistStart": TaskSchedule(1, "data_dist"),
            "EmbInputDistWait": TaskSchedule(1, "data_dist"),
            "EmbPrefetch": TaskSchedule(1, "data_dist"),
            "EmbForward": TaskSchedule(1, "emb_lookup"),
        },
        (
            "EmbInputDistStart",
            "H2DAndShuffle",
            "DenseForward",
            "LossPostprocess",
            "EmbInputDistWait",
            "DenseBackward",
            "EmbBackward",
            "EmbPrefetch",
            "EmbForward",
            "FinalizeGrads",
            "OptimStep",
        ),
    ),
    # TorchRec's TrainPipelineSemiSync, from its first batch on and without stash_gradients. The lookup stays on the
    # current stream: on another one, what of the tables it reads would depend on which stream is faster.
    "semi_sync": NamedPlan(
        "the copy three batches ahead, the input dist two, and the lookup one, before the batch before is trained",
        {
            "H2DAndShuffle": TaskSchedule(3, "memcpy"),
            "EmbInputDistStart": TaskSchedule(2, "data_dist"),
            "EmbInputDistWait": TaskSchedule(2, "data_dist"),
            "EmbPrefetch": TaskSchedule(1, "data_dist"),
            "EmbForward": TaskSchedule(1),
        },
        (
            "EmbInputDistStart",
            "H2DAndShuffle",
            "DenseForward",
            "LossPostprocess",
            "EmbPrefetch",
            "EmbForward",
            "EmbInputDistWait",
            "DenseBackward",
            "EmbBackward",
            "FinalizeGrads",
            "OptimStep",
        ),
        (("EmbBackward", "EmbForward"),),
    ),
}


# What may have a thread of its own: it waits, and submits nothing. The others submit to process groups, which two
# threads may not use in turn, or run what users wrote, which draws random numbers and expects the main thread.
ON_WORKERS = frozenset({"EmbPrefetch"})


def recsys_plan(plan: str | Path | PipelinePlan, tasks: Sequence[PipelineTask]) -> PipelinePlan:
    """The plan called *plan*, over *tasks*.

    Args:
        plan: a name in :data:`PLANS`, the path of a plan in YAML, or a plan, of which the schedule is taken.
        tasks: the recsys tasks, in serial order (:func:`~lightning_pipe.recsys.tasks.training.recsys_tasks`). If those
            of a balancer are among them, plans that do not name these have them as far ahead as the copy; if not, plans
            that name them do without. So for the average of replicas, which plans have behind the tables' backward.

    Raises:
        PlanError: neither a known name nor a file, or a plan that these tasks cannot run under.
    """
    if isinstance(plan, str) and plan in PLANS and PLANS[plan].looks_ahead:
        _check_lookups(plan, tasks)
    found = _find(plan, tasks)
    if looks_ahead(found):
        _check_lookups(found.name, tasks)
    for task, where in found.schedule.items():
        if where.thread_group != MAIN and task not in ON_WORKERS:
            raise PlanError(
                f"plan {found.name!r} gives task {task!r} to the thread group {where.thread_group!r}; it submits to"
                f" process groups or runs users' code, which is the main thread's: give it thread_group {MAIN!r}. Of"
                f" the recsys tasks {', '.join(sorted(ON_WORKERS))} can have a thread of its own"
            )
    return found


def read_beyond_tables(tasks: Sequence[PipelineTask]) -> list[str]:
    """What of the state that outlives an iteration lookups read beside tables, which keeps them at their place."""
    return [
        str(entry)
        for task in tasks
        if task.name == "EmbForward"
        for entry in task.reads
        if isinstance(entry, State) and entry != "tables"
    ]


def _check_lookups(plan: str, tasks: Sequence[PipelineTask]) -> None:
    if read := read_beyond_tables(tasks):
        raise PlanError(
            f"plan {plan!r} looks up batches ahead of their turn, but this model's lookups read {', '.join(read)} too,"
            " which the batch before still changes: it has feature processors, kernels that are not FBGEMM's fused"
            " ones, tables that the dense optimiser trains, or replicas of tables with sync_every above 1, which are"
            " averaged before validation and checkpoints, too. Use the plan 'prefetch'"
        )


def needs_input_group(plan: PipelinePlan) -> bool:
    """Whether the input dist is to have a process group beside the tables' own; all ranks call this, with one plan."""
    world = dist.group.WORLD
    # Without a batch ahead nothing else is under way beside it.
    return plan.max_stage > 0 or (world is not None and gains_from_messages(world))


def looks_ahead(plan: PipelinePlan) -> bool:
    """Whether *plan* looks up batches before it is their turn: what is read there may change until then."""
    return plan.schedule["EmbForward"].stage > 0


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
        return _built(plan_content(plan), tasks)
    if isinstance(plan, str) and plan in PLANS:
        named = PLANS[plan]
        # Where EmbBackward is the last task (recsys_tasks(scaled_late=True)), it follows OptimStep in the period too.
        order, schedule, stale = named.order, named.schedule, named.stale
        if _replicated(tasks):
            order = (*with_replicas(order),) if order else ()
            stale = (*stale_with_replicas(stale), *stale)
        if _scaled_late(tasks):
            order = _late_backward(order)
        if order and _balanced(tasks):
            copy, input_dist = schedule["H2DAndShuffle"], schedule["EmbInputDistStart"]
            schedule = {**schedule, **balancing_schedule(copy.stage, input_dist.stream)}
            order = (*with_balancing(order, copy.stage != input_dist.stage),)
        places = [(task, schedule.get(task.name, TaskSchedule())) for task in tasks]
        return PipelinePlan(places, stale=stale, name=plan, order=order)
    with plan_file(plan, PLANS, "prefetch") as content:
        return _built(content, tasks)


def _balanced(tasks: Sequence[PipelineTask]) -> bool:
    return any(task.name in BALANCING for task in tasks)


def _replicated(tasks: Sequence[PipelineTask]) -> bool:
    return any(task.name == AVERAGING for task in tasks)


def _scaled_late(tasks: Sequence[PipelineTask]) -> bool:
    """Whether the tables' backward comes after the optimiser step."""
    names = [task.name for task in tasks if task.name in ("EmbBackward", "OptimStep")]
    return names == ["OptimStep", "EmbBackward"]


def _built(content: dict[str, Any], tasks: Sequence[PipelineTask]) -> PipelinePlan:
    """The plan that *content* describes, for just these tasks. Anything wrong with it is for the engine to refuse."""
    content["tasks"] = dict(content["tasks"])
    content_with_balancing(content, _balanced(tasks))
    content_with_replicas(content, _replicated(tasks))
    order = content.get("order")
    if _scaled_late(tasks) and names_once(order, "EmbBackward", "OptimStep"):
        content["order"] = _late_backward(order)
    return PipelinePlan.from_content(content, tasks)


def _late_backward(order: Sequence[str]) -> tuple[str, ...]:
    """*order* with ``EmbBackward`` after ``OptimStep``, and with it the average and lookups that came between the
    two."""
    if not order or order.index("EmbBackward") > order.index("OptimStep"):
        return tuple(order)
    backward, step = order.index("EmbBackward"), order.index("OptimStep")
    moved = [task for task in order[backward:step] if task in ("EmbBackward", AVERAGING, "EmbForward")]
    rest = [task for task in order if task not in moved]
    position = rest.index("OptimStep") + 1
    return (*rest[:position], *moved, *rest[position:])
