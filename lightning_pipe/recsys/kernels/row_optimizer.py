"""What trains the tables of a kernel in place of the kernel's own optimiser: where it is kept, and looked for.

Tested in ``tests/scenarios/recommenders/test_dynamic_embeddings.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_pipe.recsys.kernels.row_adam import RowAdam

__all__ = ["row_optimizer", "set_row_optimizer"]

_ATTRIBUTE = "_lightning_pipe_row_optimizer"


def set_row_optimizer(kernel: Any, optimizer: RowAdam) -> None:
    """From now on *optimizer* trains the kernel's tables."""
    setattr(kernel, _ATTRIBUTE, optimizer)


def row_optimizer(kernel: Any) -> RowAdam | None:
    """What trains a kernel's tables, if not its own optimiser."""
    found: RowAdam | None = getattr(kernel, _ATTRIBUTE, None)
    return found
