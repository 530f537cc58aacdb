"""Gradients of a mini-batch: sums over micro-batches, and autograd nodes that connect them to the caller's graph.

Each cell has its own graph. Two nodes connect these graphs to the caller's graph::

    inputs, parameters ──► Run ──token──► Result ──► outputs ──► the user's loss

Result's backward stores the gradients of the outputs. Run's backward then runs the backwards of all cells, in their
threads, and waits for them. The nodes are separate because autograd has one thread per GPU, which runs all nodes with
gradients on that GPU: a node that waits for the cells in that thread would deadlock, because the cells need the same
thread. The token is on the CPU, so that Run waits in the thread that has called backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.engine import SetupError

# Maps gradients of the outputs to gradients of inputs and parameters.
Backward = Callable[[list[Tensor | None]], Sequence[Tensor | None]]


class GradientSums:
    """Sums of gradients, added in order of arrival, as autograd does for a tensor with several uses."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}
        self._unshared: set[int] = set()

    def add(self, parameter: Tensor, gradient: Tensor) -> None:
        """Add a gradient of *parameter*."""
        key = id(parameter)
        total = self._sums.get(key)
        if total is None:
            self._sums[key] = gradient
        elif key in self._unshared and total.layout == gradient.layout:
            total.add_(gradient)
        else:
            # Out of place, because the first gradient may be shared: autograd passes tensors through if it can.
            # PyTorch supports dense + sparse, but not sparse + dense.
            dense_last = total.is_sparse and not gradient.is_sparse
            self._sums[key] = gradient + total if dense_last else total + gradient
            self._unshared.add(key)

    def get(self, parameter: Tensor) -> Tensor | None:
        """Return the sum of *parameter*; None without a gradient."""
        return self._sums.get(id(parameter))


def attach_backward(outputs: Sequence[Tensor], upstream: Sequence[Tensor], backward: Backward) -> list[Tensor]:
    """Return outputs whose backward calls a function."""
    pending = _PendingBackward(backward)
    token = _RunPendingBackward.apply(pending, *upstream)
    return list(_StoreOutputGradients.apply(pending, token, *outputs))


def attach_precomputed_gradients(
    loss: Tensor, upstream: Sequence[Tensor], gradients: Callable[[Tensor], Sequence[Tensor | None]]
) -> Tensor:
    """Return a loss whose gradients have already been computed."""
    pending = _PendingBackward(lambda grads: gradients(grads[0] if grads[0] is not None else torch.ones_like(loss)))
    token = _RunPendingBackward.apply(pending, *upstream)
    attached: Tensor = _StoreOutputGradients.apply(pending, token, loss)[0]
    return attached


class _PendingBackward:
    """Backward function that can run once."""

    def __init__(self, backward: Backward) -> None:
        self._backward: Backward | None = backward
        self.output_gradients: list[Tensor | None] = []

    def __call__(self) -> Sequence[Tensor | None]:
        backward, self._backward = self._backward, None
        if backward is None:
            raise SetupError(
                "backward was called a second time for the same forward of a pipe, whose graph is freed. Call the pipe"
                " again, or add the losses and call backward once (retain_graph has no effect on a pipe)"
            )
        output_gradients, self.output_gradients = self.output_gradients, []
        return backward(output_gradients)


class _RunPendingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: _PendingBackward, *upstream: Tensor) -> Tensor:
        ctx.pending = pending
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.pending())


class _StoreOutputGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: _PendingBackward, token: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # The gradients have no graph: a second derivative would silently treat them as constants.
            raise SetupError(
                "backward through a pipe was called with create_graph=True, but a pipe does not support second"
                " derivatives. Use the Sequential without a pipe"
            )
        ctx.pending.output_gradients = list(gradients)
        return (None, torch.empty(0, device="cpu"), *(None for _ in gradients))
