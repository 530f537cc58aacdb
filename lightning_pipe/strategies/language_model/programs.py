"""Programs of a model in stages: one of training, one for each evaluation.

Tested in ``tests/strategies/language_model/test_strategy.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_pipe.engine import SetupError, SWPipeline
from lightning_pipe.llm.run.preparation import PreparedBatch
from lightning_pipe.llm.run.training_tasks import llm_evaluation_plan, llm_plan
from lightning_pipe.loops import EvaluationProgram, TrainingProgram

__all__ = ["StagePrograms"]

Prepare = Callable[..., PreparedBatch]


class StagePrograms:
    """The programs that Lightning's loops have asked for and that are not closed yet."""

    def __init__(self) -> None:
        self._training: TrainingProgram | None = None
        self._evaluations: list[EvaluationProgram] = []

    @property
    def training(self) -> TrainingProgram:
        """Program of the training that runs.

        Raises:
            SetupError: no training runs.
        """
        if self._training is None:
            raise SetupError("there is no pipeline; Trainer.fit makes one when training begins")
        return self._training

    def train(self, transfer: Callable[[Any], Any], prepare: Prepare, device: torch.device) -> TrainingProgram:
        """Make the program of training."""
        self._training = TrainingProgram(
            SWPipeline(llm_plan(transfer, prepare), device),
            transfer="H2D",
            forward="ScheduleStep",
            backward="ScaleGradients",
            step="OptimStep",
        )
        return self._training

    def evaluate(
        self, transfer: Callable[[Any], Any], prepare: Prepare, device: torch.device, step: str
    ) -> EvaluationProgram:
        """Make the program that evaluates the batches of one dataloader."""
        plan = llm_evaluation_plan(transfer, prepare, name=step)
        program = EvaluationProgram(SWPipeline(plan, device), transfer="H2D", step="ScheduleForward")
        self._evaluations.append(program)
        return program

    def prepared_ahead(self) -> PreparedBatch | None:
        """Take the prepared form of the batch that is being trained or evaluated, if a program has prepared it."""
        for program in (*self._evaluations, *([] if self._training is None else [self._training])):
            if program.current is not None:
                prepared: PreparedBatch | None = program.current.__dict__.pop("prepared", None)
                return prepared
        return None

    def close(self) -> None:
        """Close all programs."""
        for program in (*([] if self._training is None else [self._training]), *self._evaluations):
            program.close()
        self._training, self._evaluations = None, []
