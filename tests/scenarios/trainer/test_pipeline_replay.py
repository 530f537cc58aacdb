"""Tasks whose work is not their function's alone cannot be replayed, and say why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_pipe.engine import PipelinePlan, PlanError, SWPipeline
from lightning_pipe.llm.run.training_tasks import llm_evaluation_plan, llm_plan
from lightning_pipe.loops import PipelineTrainingEpochLoop
from lightning_pipe.loops.programs.default_program import build_default_evaluation_program, build_plan_of_default_tasks
from tests.loops.models import Net
from tests.loops.models import trainer as quiet
from tests.strategies.cases import fit
from tests.strategies.llm_cases import Tiny, llm, row_batches
from tests.strategies.llm_cases import fit as fit_llm


def same(batch: Any, *_: Any) -> Any:
    return batch


def evaluation() -> PipelinePlan:
    program = build_default_evaluation_program(quiet(), same, "validation_step")
    program.close()
    return program.pipeline.plan


MAKES: dict[str, Callable[[], PipelinePlan]] = {
    "plain": lambda: build_plan_of_default_tasks(same),
    "plain evaluation": evaluation,
    "stages": lambda: llm_plan(same, same),
    "evaluation in stages": lambda: llm_evaluation_plan(same, same, "validation_step"),
}


@pytest.mark.parametrize("which", MAKES)
def test_each_task_is_refused_and_says_why(which: str) -> None:
    plan = MAKES[which]()
    with SWPipeline(plan, torch.device("cpu")) as pipeline:
        for name, task in plan.tasks.items():
            assert task.not_replayable
            with pytest.raises(PlanError, match=f"{name!r} cannot be replayed, since {task.not_replayable}"):
                pipeline.enable_shortcut(name)
        assert pipeline.shortcut_tasks == ()


class Shortcut(pl.Callback):
    """Asks for the replay of a task behind the second batch."""

    def __init__(self, task: str) -> None:
        self.task = task

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loop = trainer.fit_loop.epoch_loop
        assert isinstance(loop, PipelineTrainingEpochLoop)
        assert loop.program is not None
        if batch_idx == 1:
            loop.program.pipeline.enable_shortcut(self.task)


def test_a_shortcut_of_the_training_that_runs_is_refused() -> None:
    module = Net()
    with pytest.raises(PlanError, match="'TrainBatch' cannot be replayed, since Lightning trains the batch"):
        fit(module, "pipeline", module.train_dataloader(), callbacks=[Shortcut("TrainBatch")])
    with pytest.raises(PlanError, match="'ScheduleStep' cannot be replayed, since the ranks with the neighboring"):
        fit_llm(Tiny(), llm("1f1b", 2), row_batches(3), callbacks=[Shortcut("ScheduleStep")])
