"""Registry of optimisers that train the tables of a kernel in place of the kernel's optimiser.

Tested in ``tests/scenarios/recommenders/test_dynamic_embeddings.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

_ATTRIBUTE = "_lightning_pipe_row_optimizer"


class RowOptimizer(Protocol):
    """Trains the tables of one kernel.

    Attributes:
        states: states of each table (rows x columns).
    """

    states: list[list[Tensor]]

    def step(self, calls: Sequence[tuple[Any, Tensor]]) -> None:
        """Train the rows that one batch looked up, from the kernel's calls and the gradients of their outputs."""


def set_row_optimizer(kernel: Any, optimizer: RowOptimizer) -> None:
    """Let *optimizer* train the kernel's tables from now on."""
    setattr(kernel, _ATTRIBUTE, optimizer)


def row_optimizer(kernel: Any) -> RowOptimizer | None:
    """Return the optimiser that replaces a kernel's optimiser, or None."""
    found: RowOptimizer | None = getattr(kernel, _ATTRIBUTE, None)
    return found
