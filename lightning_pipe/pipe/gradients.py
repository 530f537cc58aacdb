"""Gradients of a partition's parameters, summed over micro-batches."""

from __future__ import annotations

from torch import Tensor

__all__ = ["GradientSums"]


class GradientSums:
    """Sums gradients in the order in which they come, as autograd does for a tensor that is used several times."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._own: set[int] = set()

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add to what there is of *parameter*."""
        key = id(parameter)
        known = self._sums.get(key)
        if known is None:
            self._sums[key] = gradient
        elif key in self._own and known.layout == gradient.layout:
            known.add_(gradient)
        else:
            # The first may be a tensor that others hold too: autograd hands on what it was given where it can.
            # PyTorch adds a sparse tensor to a dense one, and not the other way round.
            dense_last = known.is_sparse and not gradient.is_sparse
            self._sums[key] = gradient + known if dense_last else known + gradient
            self._own.add(key)

    def of(self, parameter: Tensor) -> Tensor | None:
        """The sum, None where no gradient came."""
        return self._sums.get(id(parameter))
