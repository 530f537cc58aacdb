"""The programs for a strategy that brings none: the next batch is moved to the device while this one is at work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

from lightning_pipe.engine import IterContext, PipelinePlan, PipelineTask, State, SWPipeline, TaskSchedule
from lightning_pipe.loops.program import EvaluationProgram, TrainingProgram


def default_plan(transfer: Callable[[Any], Any]) -> PipelinePlan:
    """Two tasks: ``H2D`` one iteration ahead on a stream of its own, ``TrainBatch`` as Lightning trains a batch.

    Args:
        transfer: moves a batch to the device.
    """

    def copy(ctx: IterContext) -> None:
        ctx.batch = transfer(ctx.batch)

    def train(ctx: IterContext) -> None:
        """Lightning's part, done between begin_step and end_step; a skipped batch comes here and has none."""

    tasks = {
        PipelineTask("H2D", copy, reads=("batch",), writes=("batch",)): TaskSchedule(stage=1, stream="memcpy"),
        PipelineTask("TrainBatch", train, reads=("batch",), writes=(State("model"),)): TaskSchedule(),
    }
    return PipelinePlan(tasks, name="copy_ahead")


def default_evaluation(
    trainer: pl.Trainer, transfer: Callable[[Any], Any], step: str, *, ahead: bool = True
) -> EvaluationProgram:
    """The program that evaluates one batch while the next one is moved to the device.

    Args:
        trainer: the trainer whose strategy evaluates.
        transfer: moves a batch to the device.
        step: the module's method, which the caller calls.
        ahead: whether the next batch is moved meanwhile, or when its turn comes.
    """

    def copy(ctx: IterContext) -> None:
        ctx.batch = transfer(ctx.batch)

    def evaluate(ctx: IterContext) -> None:
        """The caller's part, done between begin_step and end_step."""

    where = TaskSchedule(stage=1, stream="memcpy") if ahead else TaskSchedule()
    tasks = {
        PipelineTask("H2D", copy, reads=("batch",), writes=("batch",)): where,
        PipelineTask("EvaluateBatch", evaluate, reads=("batch", State("model"))): TaskSchedule(),
    }
    pipeline = SWPipeline(PipelinePlan(tasks, name=step), trainer.strategy.root_device)
    return EvaluationProgram(pipeline, transfer="H2D", step="EvaluateBatch")


def default_program(trainer: pl.Trainer, transfer: Callable[[Any], Any]) -> TrainingProgram:
    """The program that runs the default plan.

    Args:
        trainer: the trainer whose strategy trains.
        transfer: moves a batch to the device.
    """
    pipeline = SWPipeline(default_plan(transfer), trainer.strategy.root_device)
    return TrainingProgram(pipeline, transfer="H2D", step="TrainBatch")
