"""Accumulation of the gradients of several batches for one step of the dense optimiser."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from lightning_pipe.engine import IterContext, SetupError
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.recsys.dense.dense_reduction import DenseGradientReducer


class Accumulation:
    """Selects the batches that clear gradients, average them over ranks and step the dense optimiser.

    Table optimisers are fused into backward. Tables therefore step in every batch, with the gradients of that batch's
    part of the loss.
    """

    def __init__(self, batches: int, optimizer: torch.optim.Optimizer, reducer: DenseGradientReducer | None) -> None:
        check_whole_number("accumulate", batches, 1)
        if batches > 1 and reducer is None:
            raise SetupError(
                f"accumulate is {batches}, but the model averages its gradients in every backward. Pass the model that"
                " shard_model() returns, or set accumulate to 1"
            )
        self._batches = batches
        self._optimizer = optimizer
        self._reducer = reducer
        self._done = 0

    @property
    def _is_last(self) -> bool:
        return self._done == self._batches - 1

    def zero_grad(self) -> None:
        """Clear gradients before the first forward of a step."""
        if self._done == 0:
            self._optimizer.zero_grad()

    def part_of(self, loss: torch.Tensor) -> torch.Tensor:
        """Part of a batch's loss that its backward starts from."""
        return loss if self._batches == 1 else loss / self._batches

    def reducing(self) -> AbstractContextManager[Any]:
        """Context for the backward of a batch: gradients are averaged over ranks only in the last batch of a step."""
        return nullcontext() if self._reducer is None or self._is_last else self._reducer.no_sync()

    def step(self) -> None:
        """Step the dense optimiser after the backward of the last batch of a step."""
        if self._is_last:
            self._optimizer.step()

    def trained(self, ctx: IterContext) -> None:
        """Count a batch that has finished."""
        if ctx.has_gradients:
            self._done = (self._done + 1) % self._batches
