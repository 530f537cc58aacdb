"""Gradients of a mini-batch: their sums over micro-batches, and the autograd nodes that connect them to the caller's.

Each cell has a graph of its own. These graphs meet the graph of whoever calls backward in two nodes::

    inputs, parameters ──► Run ──token──► Result ──► outputs ──► the user's loss

Result's backward keeps the outputs' gradients; Run's then runs all cells backward, in their threads, and waits for
them. The two are apart since on a GPU autograd has one thread for each device, which runs the nodes whose gradients are
there: a node that waited in it for the cells would wait for what only this thread can do. The token is on the CPU, so
that Run waits in the thread that has called backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipe.engine import SetupError

__all__ = ["GradientSums", "attach", "attach_loss"]

# Gradients of the outputs in, gradients of inputs and parameters out.
Backward = Callable[[list[Tensor | None]], Sequence[Tensor | None]]


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


def attach(outputs: Sequence[Tensor], upstream: Sequence[Tensor], backward: Backward) -> list[Tensor]:
    """Outputs whose backward is a function.

    Args:
        outputs: without a graph.
        upstream: tensors that gradients are for.
        backward: called once, with a gradient, or None, for each output; returns one, or None, for each of *upstream*.
    """
    pending = _Pending(backward)
    token = _RunPending.apply(pending, *upstream)
    return list(_Result.apply(pending, token, *outputs))


def attach_loss(
    loss: Tensor, upstream: Sequence[Tensor], gradients: Callable[[Tensor], Sequence[Tensor | None]]
) -> Tensor:
    """A loss whose gradients are known.

    Args:
        loss: a scalar.
        upstream: tensors that they are for.
        gradients: called once, with the gradient of the loss; returns one, or None, for each.
    """
    pending = _Pending(lambda given: gradients(given[0] if given[0] is not None else torch.ones_like(loss)))
    token = _RunPending.apply(pending, *upstream)
    attached: Tensor = _Result.apply(pending, token, loss)[0]
    return attached


class _Pending:
    """A backward that has not run yet."""

    def __init__(self, backward: Backward) -> None:
        self._backward: Backward | None = backward
        self.given: list[Tensor | None] = []

    def __call__(self) -> Sequence[Tensor | None]:
        backward, self._backward = self._backward, None
        if backward is None:
            raise SetupError(
                "backward runs a second time through the same forward of a pipe, whose graph is freed; call the pipe"
                " again, or add the losses and call backward once (retain_graph keeps nothing here)"
            )
        given, self.given = self.given, []
        return backward(given)


class _RunPending(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: _Pending, *upstream: Tensor) -> Tensor:
        ctx.pending = pending
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.pending())


class _Result(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: _Pending, token: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            # The first derivative has no graph: what is differentiated again would be taken for a constant.
            raise SetupError(
                "a gradient through a pipe is asked for with create_graph=True, to be differentiated again, which"
                " cannot be; use the Sequential without a pipe for that"
            )
        ctx.pending.given = list(gradients)
        return (None, torch.empty(0, device="cpu"), *(None for _ in gradients))
