"""The recsys plans by name: the same tasks, run serially or with more and more tasks ahead of the trained batch.

batches ahead      copy    input dist    rows fetched    looked up    tables include updates up to
serial             0       0             0               0            the previous batch
threaded_input     1       1             0               0            the previous batch
base               2       1             0               0            the previous batch
prefetch           2       2, 1          1               0            the previous batch
early_prefetch     2       2, 1          1               0            the previous batch
fused_sparse_dist  2       1             1               1            the previous batch
compute_ahead      2       2             2               1, 0         the previous batch
semi_sync          3       2             1               1            the batch before the previous one

``compute_ahead`` looks up the rows that the previous batch has as well in the batch's turn, all others one batch ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from lightning_pipe.engine import PipelinePlan, PipelineTask, PlanError, PlanSpec, State, TaskSchedule
from lightning_pipe.engine.plans.schedule import MAIN
from lightning_pipe.engine.plans.spec import Edge
from lightning_pipe.engine.plans.user_files import open_plan_file
from lightning_pipe.engine.ranks.gloo_all_to_all import is_multi_host_gloo_group

# Tasks of a balancer, and the average of table replicas, which only some models have.
BALANCING = ("BalanceStart", "BalanceFinish")
SYNC_REPLICAS = "SyncReplicas"
# Tasks of plans that look up a batch in two parts.
DIVISION = ("EmbOverlap", "EmbForwardAhead")
_LOOKUP = ("H2DAndShuffle", "EmbInputDistStart", "EmbInputDistWait", "EmbPrefetch", "EmbForward")
_STEP = ("DenseForward", "LossPostprocess", "DenseBackward", "EmbBackward", "FinalizeGrads", "OptimStep")


def _make_plan_spec(
    name: str, ahead: dict[str, TaskSchedule], order: tuple[str, ...], stale: tuple[Edge, ...] = ()
) -> PlanSpec:
    """Plan in which each task without an entry in *ahead* runs in the period in which its batch is trained."""
    schedule = {task: ahead.get(task, TaskSchedule()) for task in dict.fromkeys((*ahead, *_LOOKUP, *_STEP))}
    return PlanSpec(name, schedule, order, stale=stale)


# NVIDIA's JaggedMegatronPrefetchTrainPipelineSparseDist, step by step: TorchRec's prefetch pipeline with the prefetch
# in a separate thread, overlapped with the backward pass.
_PREFETCH = _make_plan_spec(
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
    _make_plan_spec("serial", {}, ()),
    # TorchRec's TrainPipelineSparseDist, step by step.
    _make_plan_spec(
        "base",
        {
            "H2DAndShuffle": TaskSchedule(2, "memcpy"),
            "EmbInputDistStart": TaskSchedule(1, "data_dist"),
            "EmbInputDistWait": TaskSchedule(1, "data_dist"),
            "EmbPrefetch": TaskSchedule(0, "data_dist"),
        },
        # The next batch's splits are exchanged during this batch's forward pass, its ids during the tasks after that.
        (
            *("EmbInputDistStart", "H2DAndShuffle", "EmbPrefetch", "EmbForward", "DenseForward", "LossPostprocess"),
            *("EmbInputDistWait", "DenseBackward", "EmbBackward", "FinalizeGrads", "OptimStep"),
        ),
    ),
    # A worker thread copies the next batch and distributes its ids while this batch trains. The ids are submitted
    # between two collectives of the main thread, at a point that is the same on all ranks.
    _make_plan_spec(
        "threaded_input",
        {
            "H2DAndShuffle": TaskSchedule(1, "input", "input"),
            "EmbInputDistStart": TaskSchedule(1, "input", "input", globally_ordered=True),
            "EmbInputDistWait": TaskSchedule(1, "input", "input", globally_ordered=True),
            "EmbPrefetch": TaskSchedule(0, "data_dist"),
            **{task: TaskSchedule(globally_ordered=True) for task in ("EmbForward", *_STEP[1:])},
        },
        (
            *("H2DAndShuffle", "EmbPrefetch", "EmbForward", "EmbInputDistStart", "EmbInputDistWait"),
            *_STEP,
        ),
    ),
    _PREFETCH,
    # The prefetch precedes the lookup, so a whole step hides it. For rows that are read from disk.
    replace(_PREFETCH.move("EmbPrefetch", after="EmbInputDistWait"), name="early_prefetch"),
    # TorchRec's TrainPipelineFusedSparseDist. Tables are updated in the backward of their lookups, so the lookup of the
    # next batch overlaps with the rest of this one: reduction of dense gradients, optimizer step and logging.
    _make_plan_spec(
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
    # As TorchRec's TrainPipelinePEC, but gradients are not divided, which keeps every optimizer exact. Rows are sent
    # while the batch before trains. The exchange of which rows that are is hidden behind the end of the step before.
    _make_plan_spec(
        "compute_ahead",
        {
            "H2DAndShuffle": TaskSchedule(2, "memcpy"),
            "EmbInputDistStart": TaskSchedule(2, "data_dist"),
            "EmbInputDistWait": TaskSchedule(2, "data_dist"),
            "EmbPrefetch": TaskSchedule(2, "data_dist"),
            "EmbOverlap": TaskSchedule(2, "data_dist"),
            "EmbForwardAhead": TaskSchedule(1),
        },
        (
            *("H2DAndShuffle", "EmbInputDistStart", "EmbForward", "EmbForwardAhead", "DenseForward"),
            *("LossPostprocess", "EmbInputDistWait", "DenseBackward", "EmbBackward", "EmbPrefetch", "EmbOverlap"),
            *("FinalizeGrads", "OptimStep"),
        ),
    ),
    # TorchRec's TrainPipelineSemiSync, stale from the first batch and without stash_gradients. The lookup stays on the
    # current stream: on another stream, the table values that it reads would depend on which stream is faster.
    _make_plan_spec(
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


# Tasks up to the input dist. They may run in a worker thread: they use process groups of their own.
INPUT = ("H2DAndShuffle", *BALANCING, "EmbInputDistStart", "EmbInputDistWait")
# Tasks that may run in a worker thread, as tasks of the user's own may. The others submit to process groups that the
# main thread uses between tasks too, or run the user's step.
ON_WORKERS = frozenset({*INPUT, "EmbPrefetch"})
_ON_MAIN = frozenset({*_LOOKUP, *DIVISION, *_STEP, SYNC_REPLICAS}) - ON_WORKERS


def recsys_plan(plan: str | Path | PipelinePlan, tasks: Sequence[PipelineTask]) -> PipelinePlan:
    """Build the plan called *plan* over *tasks*.

    Args:
        plan: a name in :data:`PLANS`, the path of a plan in YAML, or a plan, whose schedule is used.
        tasks: the recsys tasks, in serial order (:func:`~lightning_pipe.recsys.tasks.task_list.recsys_tasks`). If they
            include a balancer's tasks, a plan that does not name these runs them in the stage of the copy; if they do
            not, the balancer's tasks are removed from a plan that names them. The same holds for the average of
            replicas, which follows the tables' backward by default, and for lookups in two parts, whose tasks are only
            in plans that name them.

    Raises:
        PlanError: *plan* is neither a known name nor a file, or these tasks cannot run under it.
    """
    if isinstance(plan, PipelinePlan):
        return plan_of_spec(plan.spec, tasks)
    if isinstance(plan, str) and plan in PLANS:
        return plan_of_spec(PLANS[plan], tasks)
    with open_plan_file(plan, PLANS, "prefetch") as spec:
        return plan_of_spec(spec, tasks)


def plan_of_spec(spec: PlanSpec, tasks: Sequence[PipelineTask]) -> PipelinePlan:
    """Build the plan of *spec*. The balancer's tasks and the average of replicas are in it only if *tasks* has them."""
    tasks = [task for task in tasks if task.name in spec.schedule or task.name not in DIVISION]
    names = [task.name for task in tasks]
    spec = spec.without([name for name in DIVISION if name not in names])
    if len(set(DIVISION) & set(spec.schedule)) == 1:
        raise PlanError(
            f"plan {spec.name!r} has one of the tasks {' and '.join(DIVISION)}; expected both, which look up a batch in"
            " two parts, or none."
        )
    spec = _add_table_replica_sync_task(spec) if SYNC_REPLICAS in names else spec.without([SYNC_REPLICAS])
    # If gradients are scaled late (recsys_tasks(scaled_late=True)), the tables' backward follows the optimizer step.
    if [name for name in names if name in ("EmbBackward", "OptimStep")] == ["OptimStep", "EmbBackward"]:
        spec = _with_late_backward(spec)
    spec = _add_balancer_tasks(spec, names) if not set(BALANCING).isdisjoint(names) else spec.without(BALANCING)
    if looks_up_embeddings_ahead(spec):
        _check_can_look_up_embeddings_ahead(spec.name, tasks)
    for task, where in spec.schedule.items():
        if where.thread_group != MAIN and task in _ON_MAIN:
            raise PlanError(
                f"plan {spec.name!r} assigns task {task!r} to thread group {where.thread_group!r}, but of the recsys"
                f" tasks only {', '.join(sorted(ON_WORKERS))} can leave the main thread: the others submit to process"
                f" groups of the main thread or run the user's step. Set its thread_group to {MAIN!r}."
            )
    return PipelinePlan.from_spec(spec, tasks)


def _add_balancer_tasks(plan: PlanSpec, names: Sequence[str]) -> PlanSpec:
    """Add the tasks of a balancer to a plan that names neither: in the copy's stage, otherwise as the input dist.

    The gather follows the copy and the extra tasks directly behind it, and the exchange follows the dense forward:
    ranks send their workloads and compute the partition while another batch runs forward. If the order leaves no room
    for that, the exchange precedes the input dist. If the input dist of a batch comes in a later period than its copy,
    the exchange is the last task.
    """
    copy, input_dist = (plan.schedule.get(name) for name in ("H2DAndShuffle", "EmbInputDistStart"))
    if copy is None or input_dist is None or any(name in plan.schedule for name in BALANCING):
        return plan
    where = replace(input_dist, stage=copy.stage)
    gather, exchange = BALANCING
    plan = plan.insert(gather, where, after=names[names.index(gather) - 1])
    if not plan.order:
        return plan.insert(exchange, where)
    before = "EmbInputDistStart" if copy.stage == input_dist.stage else None
    end = len(plan.order) if before is None else plan.position(before)
    if plan.position(gather) < plan.position("LossPostprocess") < end:
        before = "LossPostprocess"
    return plan.insert(exchange, where, before=before)


def _add_table_replica_sync_task(plan: PlanSpec) -> PlanSpec:
    """Add the average to a plan that does not name it, directly after the tables' backward: before any later lookup.

    A lookup that does not wait for the tables' backward does not wait for the average either. A dependence of the
    lookup on the average implies one on the backward, so the average's edge is dropped first and precedes the
    backward's in ``stale``.
    """
    if SYNC_REPLICAS in plan.schedule or "EmbBackward" not in plan.schedule:
        return plan
    where = TaskSchedule(globally_ordered=plan.schedule["EmbBackward"].globally_ordered)
    stale = [(SYNC_REPLICAS, *edge[1:]) for edge in plan.stale if edge[:2] == ("EmbBackward", "EmbForward")]
    return replace(plan.insert(SYNC_REPLICAS, where, after="EmbBackward"), stale=(*stale, *plan.stale))


def lookup_state_besides_tables(tasks: Sequence[PipelineTask]) -> list[str]:
    """State besides the tables that lookups read and that outlives an iteration; it prevents lookups ahead."""
    return [
        str(entry)
        for task in tasks
        if task.name == "EmbForward"
        for entry in task.reads
        if isinstance(entry, State) and entry != "tables"
    ]


def _check_can_look_up_embeddings_ahead(plan: str, tasks: Sequence[PipelineTask]) -> None:
    if read := lookup_state_besides_tables(tasks):
        raise PlanError(
            f"plan {plan!r} looks up batches ahead of their turn, but the lookups of this model also read"
            f" {', '.join(read)}, which the previous batch still changes. The model has feature processors, kernels"
            " other than FBGEMM's fused ones, tables trained by the dense optimizer, managed collision, whose lookups"
            " evict rows, or replicas of tables with sync_every above 1, which are also averaged before validation and"
            " checkpoints. Use the plan 'prefetch'."
        )


def needs_input_dist_process_group(plan: PipelinePlan) -> bool:
    """Return True if the input dist needs a process group in addition to the tables'. Ranks pass the same plan."""
    world = dist.group.WORLD
    # If no task runs ahead, no other collective is in flight: a group only pays off for Gloo across hosts.
    return plan.max_stage > 0 or runs_input_on_worker(plan) or (world is not None and is_multi_host_gloo_group(world))


def runs_input_on_worker(plan: PipelinePlan) -> bool:
    """Return True if a worker thread runs a task of the input dist.

    The first batch must then be trained alone: it resolves the rewrite, with collectives of the main thread.
    """
    return any(plan.schedule[task].thread_group != MAIN for task in INPUT if task in plan.schedule)


def with_transfer_on_main(plan: PipelinePlan) -> PipelinePlan:
    """Move the copy of batches to the main thread, for transfers that call the user's hooks."""
    where = plan.schedule[INPUT[0]]
    if where.thread_group == MAIN:
        return plan
    schedule = {**plan.spec.schedule, INPUT[0]: replace(where, thread_group=MAIN)}
    return PipelinePlan.from_spec(replace(plan.spec, schedule=schedule), plan.tasks.values())


def divides_lookups(plan: PipelinePlan | PlanSpec) -> bool:
    """Return True if *plan* looks up a batch in two parts, the first of which precedes its turn."""
    return "EmbForwardAhead" in plan.schedule


def looks_up_embeddings_ahead(plan: PipelinePlan | PlanSpec) -> bool:
    """Return True if *plan* looks up batches before their turn; the state read there may change until then."""
    return plan.schedule.get("EmbForward", TaskSchedule()).stage > 0


def plan_supports_cached_tables(plan: PipelinePlan) -> bool:
    """Return True if *plan* trains tables with a cache on the GPU (``fused_uvm_caching``) to the serial values.

    Rows are prefetched at most one batch ahead, and looked up after the backward of the previous batch.
    """
    prefetch = plan.schedule.get("EmbPrefetch", TaskSchedule())
    stale = {(edge.upstream, edge.downstream) for edge in plan.stale}
    return prefetch.stage <= 1 and ("EmbBackward", "EmbForward") not in stale


# Tasks that an evaluation runs.
_EVALUATION = (*_LOOKUP, "DenseForward")


def evaluation_plan(training: PipelinePlan, tasks: Sequence[PipelineTask]) -> PipelinePlan:
    """Plan for evaluating a model that is trained under *training*: its tasks up to ``DenseForward``.

    ``DenseForward`` comes last in a period, so that everything started before it overlaps with it: an evaluation has no
    backward pass.
    """
    spec = training.spec.only(_EVALUATION).move("DenseForward")
    deps, cross_iter_deps = (
        tuple(edge for edge in edges if edge[0] != "DenseForward") for edges in (spec.deps, spec.cross_iter_deps)
    )
    name = f"{training.name}_evaluation"
    spec = PlanSpec(name, spec.schedule, spec.order, deps, cross_iter_deps)
    return PipelinePlan.from_spec(spec, [task for task in tasks if task.name in _EVALUATION])


def _with_late_backward(plan: PlanSpec) -> PlanSpec:
    """Move ``EmbBackward`` after ``OptimStep``, together with the average, lookups and extra tasks between the two."""
    if not plan.order or plan.position("EmbBackward") > plan.position("OptimStep"):
        return plan
    predecessor, moved, builtin_tasks = "OptimStep", False, {*_LOOKUP, *_STEP, *BALANCING}
    for task in plan.order[plan.position("EmbBackward") : plan.position("OptimStep")]:
        # A user's task stays after the task that it follows.
        moved = task in ("EmbBackward", SYNC_REPLICAS, "EmbForward") or (moved and task not in builtin_tasks)
        if moved:
            plan = plan.move(task, after=predecessor)
            predecessor = task
    return plan
