"""Methods of strategies that the evaluation loop calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl

from lightning_pipe.loops.programs.program import EvaluationProgram
from lightning_pipe.loops.uneven_evaluation import Turn

Transfer = Callable[[Any], Any]


@runtime_checkable
class BringsEvaluation(Protocol):
    """Strategy with its own evaluation plan."""

    def evaluation_program(self, trainer: pl.Trainer, transfer: Transfer, step: str) -> EvaluationProgram:
        """Build the program of one dataloader."""
        ...


@runtime_checkable
class JoinsEvaluation(Protocol):
    """Strategy whose ranks can take part in the collectives of batches that they do not have."""

    # True if values logged without sync_dist are the same on all ranks.
    logs_for_all: bool

    def in_turn(self, turn: Turn, step: str) -> AbstractContextManager[None]:
        """Context in which collectives of a step are announced to *turn*. Every rank enters it."""
        ...

    def join_evaluation(self, what: str, detail: Any) -> None:
        """Start an announced collective with empty input."""
        ...
