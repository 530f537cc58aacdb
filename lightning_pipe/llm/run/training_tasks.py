"""The tasks of a language model's training iteration, and their plan.

Most of an iteration is one task, unlike a recommender's: a schedule's step, in which neighbors wait for each other. It
is not divided further, since the schedule determines the order inside it. No task can be replayed, so
:class:`~lightning_pipe.engine.profiling.profiler.TaskProfiler` can only measure the task's own time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_pipe.engine import PipelinePlan, PipelineTask, State, TaskSchedule, TrainingContext
from lightning_pipe.llm.batches.host_values import HostSourceTracker

if TYPE_CHECKING:  # requires a newer torch than the plan, which commands show
    from lightning_pipe.llm.run.preparation import BatchInPreparation

PARAMETERS = State("parameters")
GRADIENTS = State("gradients")

_EXCHANGES = "the ranks with the neighboring stages would wait for its messages"


class LLMContext(TrainingContext):
    """Context of an iteration over pipeline stages."""

    copies: HostSourceTracker
    prepared: BatchInPreparation | None


def llm_plan(
    transfer: Callable[[Any], Any],
    prepare: Callable[[Any, HostSourceTracker], Any],
    set_prepared: Callable[[BatchInPreparation | None], None] = lambda prepared: None,
) -> PipelinePlan:
    """Training plan in which the next batch is copied and prepared ahead of the current batch's step.

    ``ScheduleStep`` calls the context's ``training_step``, and ``ScaleGradients`` its ``run_backward``; the caller sets
    both. ``OptimStep`` is the caller's work between ``begin_caller_task`` and ``end_caller_task``.
    """

    def run_training_step(ctx: LLMContext) -> None:
        # If a hook skips the batch, the context has no training_step.
        try:
            set_prepared(ctx.pop("prepared"))
            ctx.output = ctx.training_step() if ctx.has("training_step") else None
        finally:
            set_prepared(None)

    def scale_gradients(ctx: LLMContext) -> None:
        if ctx.has("run_backward"):
            ctx.run_backward()

    tasks = [
        PipelineTask(
            "ScheduleStep",
            run_training_step,
            reads=("batch", "prepared", "training_step", PARAMETERS),
            writes=("prepared", "output", GRADIENTS),
            not_replayable=_EXCHANGES,
            context=LLMContext,
        ),
        PipelineTask(
            "ScaleGradients",
            scale_gradients,
            reads=("output", "run_backward", GRADIENTS),
            writes=(GRADIENTS,),
            not_replayable="it divides gradients that the schedule has just computed by a number that ranks agree on",
        ),
        PipelineTask(
            "OptimStep",
            _leave_task_to_caller,
            reads=(GRADIENTS,),
            writes=(PARAMETERS,),
            not_replayable="Lightning runs the step and its hooks outside the task's function",
        ),
    ]
    return PipelinePlan(
        {**_build_batch_prefetch_tasks(transfer, prepare), **dict.fromkeys(tasks, TaskSchedule())}, name="llm"
    )


def llm_evaluation_plan(
    transfer: Callable[[Any], Any], prepare: Callable[[Any, HostSourceTracker], Any], name: str
) -> PipelinePlan:
    """Evaluation plan in which the next batch is copied and prepared ahead of the current batch's forward."""

    forward_task = PipelineTask(
        "ScheduleForward", _leave_task_to_caller, reads=("batch", "prepared", PARAMETERS), not_replayable=_EXCHANGES
    )
    return PipelinePlan({**_build_batch_prefetch_tasks(transfer, prepare), forward_task: TaskSchedule()}, name=name)


def _leave_task_to_caller(ctx: LLMContext) -> None:
    """The caller's work, between ``begin_caller_task`` and ``end_caller_task``."""


def _build_batch_prefetch_tasks(
    transfer: Callable[[Any], Any], prepare: Callable[[Any, HostSourceTracker], Any]
) -> dict[PipelineTask, TaskSchedule]:
    def copy(ctx: LLMContext) -> None:
        ctx.copies = HostSourceTracker()
        with ctx.copies:
            ctx.batch = transfer(ctx.batch)

    def prepare_batch(ctx: LLMContext) -> None:
        copies = ctx.pop("copies")
        ctx.prepared = None if ctx.batch is None else prepare(ctx.batch, copies)

    move = PipelineTask(
        "H2D",
        copy,
        reads=("batch",),
        writes=("batch", "copies"),
        not_replayable="the loop counts the batches that are moved, and a replay moves no batch",
    )
    prepare_task = PipelineTask(
        "Prepare",
        prepare_batch,
        reads=("batch", "copies"),
        writes=("copies", "prepared"),
        not_replayable="its exchange with the other ranks can only be waited for once",
    )
    return {move: TaskSchedule(stage=1, stream="memcpy"), prepare_task: TaskSchedule(stage=1)}
