"""The programs for a strategy that brings none: the next batch is moved to the device while this one is at work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, PlanError, State, SWPipeline, TaskSchedule
from lightning_pipe.engine.plans.plan_file import plan_file
from lightning_pipe.engine.plans.schedule import MAIN
from lightning_pipe.loops.programs.program import EvaluationProgram, TrainingProgram

# The names of the tasks.
TRANSFER, TRAIN = "H2D", "TrainBatch"
_STREAM = "memcpy"

# By name, where the transfer runs; the batch is trained where the caller is.
PLANS = {"serial": TaskSchedule(), "copy_ahead": TaskSchedule(stage=1, stream=_STREAM)}

_COUNTED = "the loop counts the batches that are moved, and a replay moves none"


def default_tasks(transfer: Callable[[Any], Any]) -> list[PipelineTask]:
    """Two tasks: ``H2D`` moves a batch, ``TrainBatch`` is Lightning's training of one.

    Args:
        transfer: moves a batch to the device.
    """

    def copy(ctx: IterContext) -> None:
        ctx.batch = transfer(ctx.batch)

    def train(ctx: IterContext) -> None:
        """Lightning's part, done between begin_step and end_step; a skipped batch comes here and has none."""

    return [
        PipelineTask(TRANSFER, copy, reads=("batch",), writes=("batch",), not_replayable=_COUNTED),
        PipelineTask(
            TRAIN,
            train,
            reads=("batch",),
            writes=(State("model"),),
            not_replayable="Lightning trains the batch, with all hooks, outside of the task's function",
        ),
    ]


def default_plan(transfer: Callable[[Any], Any], plan: str | Path | PipelinePlan = "copy_ahead") -> PipelinePlan:
    """The plan called *plan*, over :func:`default_tasks`.

    Args:
        transfer: moves a batch to the device.
        plan: ``copy_ahead`` (the next batch is moved on a stream of its own before this one trains), ``serial`` (a
            batch is moved when its turn comes), the path of a plan in YAML, or a plan, of which the schedule is taken.

    Raises:
        PlanError: neither a known name nor a file, or a plan that these tasks cannot run under.
    """
    tasks = default_tasks(transfer)
    if isinstance(plan, str) and plan in PLANS:
        return PipelinePlan([(tasks[0], PLANS[plan]), (tasks[1], TaskSchedule())], name=plan)
    if isinstance(plan, PipelinePlan):
        return _checked(PipelinePlan.from_spec(plan.spec, tasks))
    with plan_file(plan, PLANS, "pipeline") as spec:
        return _checked(PipelinePlan.from_spec(spec, tasks))


def _checked(plan: PipelinePlan) -> PipelinePlan:
    """*plan*, once what the engine does not ask of it, and Lightning's loop does, is checked."""
    transfer, train = plan.schedule[TRANSFER], plan.schedule[TRAIN]
    if transfer.thread_group != MAIN:
        raise PlanError(
            f"plan {plan.name!r} gives task {TRANSFER!r} to the thread group {transfer.thread_group!r}; it calls the"
            f" user's transfer hooks, which are the main thread's: give it thread_group {MAIN!r}"
        )
    if train != TaskSchedule():
        raise PlanError(
            f"plan {plan.name!r} schedules task {TRAIN!r} as {train}, but Lightning trains the batch where it calls"
            " its hooks: give the task {}"
        )
    if plan.order != (TRANSFER, TRAIN):
        raise PlanError(
            f"plan {plan.name!r} has the order {', '.join(plan.order)}, but Lightning's hooks around a batch come"
            f" behind the transfer of a later one: give the order {TRANSFER}, {TRAIN}"
        )
    return plan


def plans_to_try(tasks: Sequence[PipelineTask], max_in_flight: int) -> tuple[list[PipelinePlan], list[PipelinePlan]]:
    """The hand-written plans, the serial one first; and those that move batches further ahead, one after the other.

    There is no other plan to find: the user's transfer hooks stay on the main thread, and training is one task, so
    plans differ in how far ahead batches are moved, which costs memory and evens out transfers that vary.

    Args:
        tasks: of :func:`default_tasks`.
        max_in_flight: the most batches in flight.
    """
    copy, train = tasks

    def plan(name: str, where: TaskSchedule) -> PipelinePlan:
        return PipelinePlan([(copy, where), (train, TaskSchedule())], name=name)

    by_hand = [plan(name, where) for name, where in PLANS.items() if where.stage < max_in_flight]
    further = [plan(f"copy_{stage}_ahead", TaskSchedule(stage, _STREAM)) for stage in range(2, max_in_flight)]
    return by_hand, further


# ---------------------------------------------------------------------- programs


def default_evaluation(
    trainer: pl.Trainer, transfer: Callable[[Any], Any], step: str, *, ahead: int = 1
) -> EvaluationProgram:
    """The program that evaluates one batch while later ones are moved to the device.

    Args:
        trainer: the trainer whose strategy evaluates.
        transfer: moves a batch to the device.
        step: the module's method, which the caller calls.
        ahead: how many batches ahead one is moved; with 0 when its turn comes.
    """

    def copy(ctx: IterContext) -> None:
        ctx.batch = transfer(ctx.batch)

    def evaluate(ctx: IterContext) -> None:
        """The caller's part, done between begin_step and end_step."""

    where = TaskSchedule(stage=ahead, stream=_STREAM) if ahead else TaskSchedule()
    tasks = {
        PipelineTask(TRANSFER, copy, reads=("batch",), writes=("batch",), not_replayable=_COUNTED): where,
        PipelineTask(
            "EvaluateBatch",
            evaluate,
            reads=("batch", State("model")),
            not_replayable="Lightning evaluates the batch, with all hooks, outside of the task's function",
        ): TaskSchedule(),
    }
    pipeline = SWPipeline(PipelinePlan(tasks, name=step), trainer.strategy.root_device)
    return EvaluationProgram(pipeline, transfer=TRANSFER, step="EvaluateBatch")


def default_program(trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> TrainingProgram:
    """The program that runs the default plan.

    Args:
        trainer: the trainer whose strategy trains.
        transfer: moves a batch to the device.
    """
    pipeline = SWPipeline(default_plan(transfer), trainer.strategy.root_device)
    return TrainingProgram(pipeline, transfer=TRANSFER, step=TRAIN)
