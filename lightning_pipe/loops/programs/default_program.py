"""Programs for strategies without their own plan: the next batch is moved to the device while this one is trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, PlanError, State, SWPipeline, TaskSchedule
from lightning_pipe.engine.plans.schedule import MAIN
from lightning_pipe.engine.plans.user_files import open_plan_file
from lightning_pipe.loops.programs.program import EvaluationProgram, TrainingProgram

# The names of the tasks.
TRANSFER, TRAIN = "H2D", "TrainBatch"
_STREAM = "memcpy"

# Schedule of the transfer, keyed by the name of the plan. The batch is trained by the caller.
PLANS = {"serial": TaskSchedule(), "copy_ahead": TaskSchedule(stage=1, stream=_STREAM)}


def default_tasks(transfer: Callable[[Any], Any]) -> list[PipelineTask]:
    """Return two tasks: ``H2D`` moves a batch to the device, ``TrainBatch`` is Lightning's training of a batch."""
    return [
        _transfer_task(transfer),
        PipelineTask(
            TRAIN,
            _do_nothing,
            reads=("batch",),
            writes=(State("model"),),
            not_replayable="Lightning trains the batch, with all hooks, outside the task's function",
        ),
    ]


def _transfer_task(transfer: Callable[[Any], Any]) -> PipelineTask:
    def copy(ctx: IterContext) -> None:
        ctx.batch = transfer(ctx.batch)

    counted = "the loop counts transferred batches, and a replay transfers none"
    return PipelineTask(TRANSFER, copy, reads=("batch",), writes=("batch",), not_replayable=counted)


def _do_nothing(ctx: IterContext) -> None:
    """Do nothing: Lightning works on the batch between begin_step and end_step, unless the batch is skipped."""


def build_plan_of_default_tasks(
    transfer: Callable[[Any], Any], plan: str | Path | PipelinePlan = "copy_ahead"
) -> PipelinePlan:
    """Build a plan of :func:`default_tasks`."""
    tasks = default_tasks(transfer)
    if isinstance(plan, str) and plan in PLANS:
        return PipelinePlan([(tasks[0], PLANS[plan]), (tasks[1], TaskSchedule())], name=plan)
    if isinstance(plan, PipelinePlan):
        return _check_plan_fits_loop(PipelinePlan.from_spec(plan.spec, tasks))
    with open_plan_file(plan, PLANS, "pipeline") as spec:
        return _check_plan_fits_loop(PipelinePlan.from_spec(spec, tasks))


def _check_plan_fits_loop(plan: PipelinePlan) -> PipelinePlan:
    """Check the requirements of Lightning's loop, in addition to the engine's, and return *plan*."""
    transfer, train = plan.schedule[TRANSFER], plan.schedule[TRAIN]
    if transfer.thread_group != MAIN or train != TaskSchedule() or plan.order != (TRANSFER, TRAIN):
        raise PlanError(
            f"plan {plan.name!r} does not fit Lightning's loop, which calls the user's transfer hooks and trains the"
            f" batch on the main thread: expected {TRANSFER!r} in thread group {MAIN!r}, {TRAIN!r} with an empty"
            f" schedule {{}}, and the order {TRANSFER}, {TRAIN}; got {transfer}, {train} and {', '.join(plan.order)}."
            " Change the plan accordingly"
        )
    return plan


# ---------------------------------------------------------------------- programs


def build_default_evaluation_program(
    trainer: pl.Trainer, transfer: Callable[[Any], Any], step: str, *, ahead: int = 1
) -> EvaluationProgram:
    """Build the program that evaluates one batch while later batches are moved to the device."""
    where = TaskSchedule(stage=ahead, stream=_STREAM) if ahead else TaskSchedule()
    tasks = {
        _transfer_task(transfer): where,
        PipelineTask(
            "EvaluateBatch",
            _do_nothing,
            reads=("batch", State("model")),
            not_replayable="Lightning evaluates the batch, with all hooks, outside the task's function",
        ): TaskSchedule(),
    }
    pipeline = SWPipeline(PipelinePlan(tasks, name=step), trainer.strategy.root_device)
    return EvaluationProgram(pipeline, transfer=TRANSFER, step="EvaluateBatch")


def default_program(trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> TrainingProgram:
    """Build the program that runs the default plan."""
    pipeline = SWPipeline(build_plan_of_default_tasks(transfer), trainer.strategy.root_device)
    return TrainingProgram(pipeline, transfer=TRANSFER, step=TRAIN)
