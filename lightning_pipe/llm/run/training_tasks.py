"""The tasks of a language model's training iteration, and their plan.

Unlike a recommender's, most of an iteration is one task: a schedule's step, in which neighbours wait for each other. It
is not cut further here, since the order inside it is the schedule's. None of the tasks can be replayed, so none can be
profiled by :class:`~lightning_pipe.engine.profiling.profiler.TaskProfiler` but for its own time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_pipe.engine import PipelinePlan, PipelineTask, State, TaskSchedule, TrainingContext
from lightning_pipe.llm.run.preparation import PreparedBatch

__all__ = ["llm_evaluation_plan", "llm_plan"]

PARAMETERS = State("parameters")
GRADIENTS = State("gradients")

_EXCHANGES = "the ranks that have the neighbouring stages would wait for what it sends"


class LLMContext(TrainingContext):
    """Context of an iteration in stages.

    Attributes:
        prepared: the batch cut into micro-batches, with what ranks agree on for it; None for a batch that is None.
    """

    prepared: PreparedBatch | None


def llm_plan(
    transfer: Callable[[Any], Any],
    prepare: Callable[[Any], Any],
    hand_over: Callable[[PreparedBatch | None], None] | None = None,
) -> PipelinePlan:
    """Copy and preparation of the next batch run ahead of this one's step.

    ``ScheduleStep`` calls the context's ``training_step``, ``ScaleGradients`` its ``run_backward``, both set by the
    caller; ``OptimStep`` is the caller's work between ``begin_task`` and ``end_task``.

    Args:
        transfer: moves a batch to the device.
        prepare: cuts a batch and begins what ranks agree on for it; its result is the context's ``prepared``.
        hand_over: called with that before the training step, which runs the batch, and with None after it.
    """

    give = hand_over or (lambda _: None)

    def step(ctx: LLMContext) -> None:
        # A batch that a hook skips comes here without one.
        try:
            give(ctx.take("prepared"))
            ctx.output = ctx.training_step() if ctx.has("training_step") else None
        finally:
            give(None)

    def scale(ctx: LLMContext) -> None:
        if ctx.has("run_backward"):
            ctx.run_backward()

    def optimize(ctx: LLMContext) -> None:
        """The caller's part."""

    tasks = [
        PipelineTask(
            "ScheduleStep",
            step,
            reads=("batch", "prepared", "training_step", PARAMETERS),
            writes=("prepared", "output", GRADIENTS),
            not_replayable=_EXCHANGES,
            context=LLMContext,
        ),
        PipelineTask(
            "ScaleGradients",
            scale,
            reads=("output", "run_backward", GRADIENTS),
            writes=(GRADIENTS,),
            not_replayable="it divides gradients that a schedule has just made, by what ranks agree on",
        ),
        PipelineTask(
            "OptimStep",
            optimize,
            reads=(GRADIENTS,),
            writes=(PARAMETERS,),
            not_replayable="Lightning makes the step, with its hooks, outside of the task's function",
        ),
    ]
    return PipelinePlan({**_ahead(transfer, prepare), **dict.fromkeys(tasks, TaskSchedule())}, name="llm")


def llm_evaluation_plan(transfer: Callable[[Any], Any], prepare: Callable[[Any], Any], name: str) -> PipelinePlan:
    """Copy and preparation of the next batch run ahead of this one's way through the stages.

    Args:
        transfer: as of :func:`llm_plan`.
        prepare: see there.
        name: of the plan.
    """

    def forward(ctx: LLMContext) -> None:
        """The caller's part, between begin_task and end_task."""

    forward_task = PipelineTask(
        "ScheduleForward", forward, reads=("batch", "prepared", PARAMETERS), not_replayable=_EXCHANGES
    )
    return PipelinePlan({**_ahead(transfer, prepare), forward_task: TaskSchedule()}, name=name)


def _ahead(transfer: Callable[[Any], Any], prepare: Callable[[Any], Any]) -> dict[PipelineTask, TaskSchedule]:
    def copy(ctx: LLMContext) -> None:
        ctx.batch = transfer(ctx.batch)

    def cut(ctx: LLMContext) -> None:
        ctx.prepared = None if ctx.batch is None else prepare(ctx.batch)

    move = PipelineTask(
        "H2D",
        copy,
        reads=("batch",),
        writes=("batch",),
        not_replayable="the loop counts the batches that are moved, and a replay moves none",
    )
    prepare_task = PipelineTask(
        "Prepare",
        cut,
        reads=("batch",),
        writes=("prepared",),
        not_replayable="what it begins with the other ranks can be waited for once",
    )
    return {move: TaskSchedule(stage=1, stream="memcpy"), prepare_task: TaskSchedule(stage=1)}
