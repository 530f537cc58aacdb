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
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from lightning_pipe.engine import PipelinePlan, PipelineTask, PlanError, PlanSpec, State, TaskSchedule
from lightning_pipe.engine.plans.plan_file import plan_file
from lightning_pipe.engine.plans.schedule import MAIN
from lightning_pipe.engine.plans.spec import Edge
from lightning_pipe.engine.ranks.exchanges import gains_from_messages
from lightning_pipe.recsys.plans.with_balancer import BALANCING, with_balancing
from lightning_pipe.recsys.plans.with_replicas import AVERAGING, with_replicas

_LOOKUP = ("H2DAndShuffle", "EmbInputDistStart", "EmbInputDistWait", "EmbPrefetch", "EmbForward")
_STEP = ("DenseForward", "LossPostprocess", "DenseBackward", "EmbBackward", "FinalizeGrads", "OptimStep")


def _plan(name: str, ahead: dict[str, TaskSchedule], order: tuple[str, ...], stale: tuple[Edge, ...] = ()) -> PlanSpec:
    """A plan in which tasks that are not in *ahead* run when their batch is trained."""
    schedule = {task: ahead.get(task, TaskSchedule()) for task in (*_LOOKUP, *_STEP)}
    return PlanSpec(name, schedule, order, stale=stale)


# NVIDIA's JaggedMegatronPrefetchTrainPipelineSparseDist, step by step: TorchRec's prefetch pipeline with the prefetch
# in a thread of its own, beside the backward pass.
_PREFETCH = _plan(
    "prefetch",
    {
        "H2DAndShuffle": TaskSchedule(2, "memcpy"),
        "EmbInputDistStart": TaskSchedule(2, "data_dist"),
        "EmbInputDistWait": TaskSchedule(1, "data_dist"),
        "EmbPrefetch": TaskSchedule(1, "prefetch", thread_group="prefetch"),
    },
    (
        *("H2DAndShuffle", "EmbInputDistWait", "EmbForward", "DenseForward", "EmbPrefetch"),
        *(*_STEP[1:], "EmbInputDistStart"),
    ),
)
_NAMED = (
    _plan("serial", {}, ()),
    # TorchRec's TrainPipelineSparseDist, step by step.
    _plan(
        "base",
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
    _PREFETCH,
    # The prefetch comes before the lookup: a whole step to hide it, for rows that come from a disk.
    replace(_PREFETCH.move("EmbPrefetch", after="EmbInputDistWait"), name="early_prefetch"),
    # TorchRec's TrainPipelineFusedSparseDist: tables are written in the backward of their lookups, so the next batch is
    # looked up beside what is left of this one: its dense gradients' reduction, its optimiser step, its logging.
    _plan(
        "fused_sparse_dist",
        {
            "H2DAndShuffle": TaskSchedule(2, "memcpy"),
            "EmbInputDistStart": TaskSchedule(1, "data_dist"),
            "EmbInputDistWait": TaskSchedule(1, "data_dist"),
            "EmbPrefetch": TaskSchedule(1, "data_dist"),
            "EmbForward": TaskSchedule(1, "emb_lookup"),
        },
        (
            *("EmbInputDistStart", "H2DAndShuffle", "DenseForward", "LossPostprocess", "EmbInputDistWait"),
            *("DenseBackward", "EmbBackward", "EmbPrefetch", "EmbForward", "FinalizeGrads", "OptimStep"),
        ),
    ),
    # TorchRec's TrainPipelineSemiSync, from its first batch on and without stash_gradients. The lookup stays on the
    # current stream: on another one, what of the tables it reads would depend on which stream is faster.
    _plan(
        "semi_sync",
        {
            "H2DAndShuffle": TaskSchedule(3, "memcpy"),
            "EmbInputDistStart": TaskSchedule(2, "data_dist"),
            "EmbInputDistWait": TaskSchedule(2, "data_dist"),
            "EmbPrefetch": TaskSchedule(1, "data_dist"),
            "EmbForward": TaskSchedule(1),
        },
        (
            *("EmbInputDistStart", "H2DAndShuffle", "DenseForward", "LossPostprocess", "EmbPrefetch", "EmbForward"),
            *("EmbInputDistWait", "DenseBackward", "EmbBackward", "FinalizeGrads", "OptimStep"),
        ),
        (("EmbBackward", "EmbForward"),),
    ),
)
PLANS = {plan.name: plan for plan in _NAMED}


# What may have a thread of its own: it waits, and submits nothing. The others submit to process groups, which two
# threads may not use in turn, or run what users wrote, which draws random numbers and expects the main thread.
ON_WORKERS = frozenset({"EmbPrefetch"})


def recsys_plan(plan: str | Path | PipelinePlan, tasks: Sequence[PipelineTask]) -> PipelinePlan:
    """The plan called *plan*, over *tasks*.

    Args:
        plan: a name in :data:`PLANS`, the path of a plan in YAML, or a plan, of which the schedule is taken.
        tasks: the recsys tasks, in serial order (:func:`~lightning_pipe.recsys.tasks.task_list.recsys_tasks`). If those
            of a balancer are among them, plans that do not name these have them as far ahead as the copy; if not, plans
            that name them do without. So for the average of replicas, which plans have behind the tables' backward.

    Raises:
        PlanError: neither a known name nor a file, or a plan that these tasks cannot run under.
    """
    if isinstance(plan, PipelinePlan):
        return plan_of_spec(plan.spec, tasks)
    if isinstance(plan, str) and plan in PLANS:
        return plan_of_spec(PLANS[plan], tasks)
    with plan_file(plan, PLANS, "prefetch") as spec:
        return plan_of_spec(spec, tasks)


def plan_of_spec(spec: PlanSpec, tasks: Sequence[PipelineTask]) -> PipelinePlan:
    """Build the plan of *spec*, with the tasks of a balancer and the average of replicas only where *tasks* has them.

    Args:
        spec: a plan of the recsys tasks.
        tasks: the recsys tasks, in serial order.

    Raises:
        PlanError: a plan that these tasks cannot run under.
    """
    names = [task.name for task in tasks]
    spec = with_replicas(spec) if AVERAGING in names else spec.without([AVERAGING])
    # Where gradients are scaled late (recsys_tasks(scaled_late=True)), the tables' backward is the later of the two.
    if [name for name in names if name in ("EmbBackward", "OptimStep")] == ["OptimStep", "EmbBackward"]:
        spec = _with_late_backward(spec)
    spec = with_balancing(spec) if not set(BALANCING).isdisjoint(names) else spec.without(BALANCING)
    if looks_ahead(spec):
        _check_lookups(spec.name, tasks)
    found = PipelinePlan.from_spec(spec, tasks)
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


def looks_ahead(plan: PipelinePlan | PlanSpec) -> bool:
    """Whether *plan* looks up batches before it is their turn: what is read there may change until then."""
    return plan.schedule.get("EmbForward", TaskSchedule()).stage > 0


# What an evaluation runs of them.
_EVALUATION = (*_LOOKUP, "DenseForward")


def evaluation_plan(training: PipelinePlan, tasks: Sequence[PipelineTask]) -> PipelinePlan:
    """The plan in which a model is evaluated that is trained under *training*: its tasks up to ``DenseForward``.

    That one comes last in a period, for all that is begun before it to go on beside it: there is no backward pass.

    Args:
        training: the plan of training, which says how far ahead each task runs, and where.
        tasks: the recsys tasks, in serial order.
    """
    spec = training.spec.only(_EVALUATION).move("DenseForward")
    deps, cross_iter_deps = (
        tuple(edge for edge in edges if edge[0] != "DenseForward") for edges in (spec.deps, spec.cross_iter_deps)
    )
    name = f"{training.name}_evaluation"
    spec = PlanSpec(name, spec.schedule, spec.order, deps, cross_iter_deps)
    return PipelinePlan.from_spec(spec, [task for task in tasks if task.name in _EVALUATION])


def _with_late_backward(plan: PlanSpec) -> PlanSpec:
    """Move ``EmbBackward`` after ``OptimStep``, and with it the average, lookups and extra tasks between the two."""
    if not plan.order or plan.position("EmbBackward") > plan.position("OptimStep"):
        return plan
    after, moved, own = "OptimStep", False, {*_LOOKUP, *_STEP, *BALANCING}
    for task in plan.order[plan.position("EmbBackward") : plan.position("OptimStep")]:
        # A task of the user's stays behind the task that it follows.
        moved = task in ("EmbBackward", AVERAGING, "EmbForward") or (moved and task not in own)
        if moved:
            plan = plan.move(task, after=after)
            after = task
    return plan
