"""What trains the tables of a kernel in place of the kernel's own optimiser: where it is kept, and looked for.

Tested in ``tests/scenarios/recommenders/test_dynamic_embeddings.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

__all__ = ["RowOptimizer", "row_optimizer", "set_row_optimizer"]

_ATTRIBUTE = "_lightning_pipe_row_optimizer"


class RowOptimizer(Protocol):
    """Trains the tables of one kernel.

    Attributes:
        states: of each table, rows x columns.
    """

    states: list[list[Tensor]]

    def step(self, calls: Sequence[tuple[Any, Tensor]]) -> None:
        """Train the rows that one batch looked up: the kernel's calls, and the gradient of each one's output."""


def set_row_optimizer(kernel: Any, optimizer: RowOptimizer) -> None:
    """From now on *optimizer* trains the kernel's tables."""
    setattr(kernel, _ATTRIBUTE, optimizer)


def row_optimizer(kernel: Any) -> RowOptimizer | None:
    """What trains a kernel's tables, if not its own optimiser."""
    found: RowOptimizer | None = getattr(kernel, _ATTRIBUTE, None)
    return found
