"""Gradients of several batches in one step of the dense optimiser.

Tested in ``tests/recsys/tasks/test_train_pipeline.py``.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lightning_pipe.engine import IterContext, SetupError
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.recsys.dense.dense_reduction import DenseGradientReducer

__all__ = ["Accumulation"]


class Accumulation:
    """Which of the batches clear gradients, average them over ranks and step the dense optimiser.

    Tables step in every batch, with the gradients of its part of the loss: their optimisers are fused into backward.

    Args:
        batches: in one step, each of which counts for as much of its loss.
        optimizer: of the dense parameters.
        reducer: averages dense gradients over ranks, which only the last batch of a step needs; none where something
            else does, in every batch.

    Raises:
        SetupError: not a whole number from 1; or several, where something else averages gradients.
    """

    def __init__(self, batches: int, optimizer: torch.optim.Optimizer, reducer: DenseGradientReducer | None) -> None:
        check_whole_number("accumulate", batches, 1)
        if batches > 1 and reducer is None:
            raise SetupError(
                f"accumulate is {batches}, but the model averages its gradients in every backward; give the model that"
                " shard_model() returns"
            )
        self._batches = batches
        self._optimizer = optimizer
        self._reducer = reducer
        self._done = 0

    @property
    def _is_last(self) -> bool:
        return self._done == self._batches - 1

    def zero_grad(self) -> None:
        """Before the forward of a batch that is trained."""
        if self._done == 0:
            self._optimizer.zero_grad()

    def part_of(self, loss: torch.Tensor) -> torch.Tensor:
        """What of a batch's loss its backward begins with."""
        return loss if self._batches == 1 else loss / self._batches

    def reducing(self) -> AbstractContextManager[Any]:
        """Around the backward of a batch."""
        return nullcontext() if self._reducer is None or self._is_last else self._reducer.no_sync()

    def step(self) -> None:
        """After the backward of a batch."""
        if self._is_last:
            self._optimizer.step()

    def trained(self, ctx: IterContext) -> None:
        """When a batch is over."""
        if ctx.has_gradients:
            self._done = (self._done + 1) % self._batches
