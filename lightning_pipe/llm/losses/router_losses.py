"""Losses of a mixture of experts' routers, whose gradients enter where the routers are and not at the model's end.

A router in the middle of a pipeline never sees the main loss, nor that its loss::

    router ──► logits, passed on as they are ──► experts ──► ... ──► main loss
    router ◄── the main loss's gradient, plus that of the router's losses ◄── ...

What that gradient must be, the forward's caller says by entering a :class:`RouterLosses` around it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_pipe.engine.common.errors import InputError

__all__ = ["RouterLosses", "pass_router_logits", "sum_router_losses"]


class RouterLosses:
    """A context around the forward of a micro-batch: what its routers' losses count for, and what they come to.

    All gradients are those of a loss summed over tokens, and are divided once, at the step's end, by the number of all
    tokens. So a router's loss, which is a mean, enters times the tokens of its micro-batch: what is trained on is the
    main loss's mean plus, for each router, coefficient times the token-weighted mean of its losses.

    It is entered around forwards only, once for each stage that the micro-batch passes on a rank. Backwards need no
    context, also where they compute activations anew (``torch.utils.checkpoint``, not its reentrant variant, whose
    first forward shows no gradient): what is computed there is not noted again.

    Args:
        tokens: the micro-batch's loss tokens, of this rank's part of the sequences.
        counted: which tokens the losses are means over, a bool for each, of the shape of the layers' inputs without
            the last dimension: padding, all alike, would go to the same experts. None for all.
        scale: what the main loss is multiplied by before its backward, such as fp16's factor. :meth:`follow` finds it.
    """

    def __init__(self, tokens: int, *, counted: Tensor | None = None, scale: float | Tensor = 1.0) -> None:
        self.tokens = tokens
        self.counted = counted
        self.scale = scale
        self._found: list[Tensor] = []
        self._token: Token[RouterLosses | None] | None = None

    def __enter__(self) -> RouterLosses:
        self._token = _active.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _active.reset(self._token)

    def follow(self, loss: Tensor) -> Tensor:
        """The main loss, as it is: from its backward, which comes first, the routers' losses learn their scale.

        For a main loss on the same device that goes on to be divided or scaled, in ways that need not be known here.
        """
        followed: Tensor = _Followed.apply(loss, self)
        return followed


_active: ContextVar[RouterLosses | None] = ContextVar("router losses", default=None)


def sum_router_losses(micro_batches: Iterable[RouterLosses]) -> Tensor:
    """What the losses of routers came to, for adding up over ranks; from there, means over routers and tokens.

    Returns:
        Three numbers in float64 on the CPU: load-balancing losses and z-losses, each the sum over routers and
        micro-batches, times tokens; and the tokens that they count for. The first two divided by the third are the
        means; a load-balancing loss of 1 says that all experts have as much to do, one of E / k that k of the E do it
        all.
    """
    total = torch.zeros(3, dtype=torch.float64)
    for losses in micro_batches:
        if losses._found:
            sums = torch.stack(losses._found).cpu().double().sum(0)
            total += losses.tokens * torch.cat([sums, torch.tensor([len(losses._found)])])
    return total


# Compilers would take apart what depends on the context.
@torch.compiler.disable
def pass_router_logits(
    logits: Tensor, top_k: int, *, balance_coefficient: float = 0.0, z_coefficient: float = 0.0
) -> Tensor:
    """A router's logits, as they are; on the way back, the gradients of its losses are added to theirs.

    Of E experts, expert e gets the share f(e) of the choices (k for each token), and P(e) is its mean probability. The
    load-balancing loss is E times the sum of f(e) P(e) (Switch Transformer, arXiv 2101.03961, equations 4 to 6, with f
    over k choices); only P has a gradient. The z-loss is the mean of the logits' squared log-sum-exp (ST-MoE, arXiv
    2202.08906, equation 5). Both are computed in float32, each for this call alone: this layer, this micro-batch.

    Outside a :class:`RouterLosses` the losses have no effect.

    Args:
        logits: (tokens, experts), or with more dimensions before the last.
        top_k: experts that a token goes to: those with the largest logits.
        balance_coefficient: of the load-balancing loss.
        z_coefficient: of the z-loss.

    Raises:
        InputError: ``counted`` tokens that are not as many as the logits'.
    """
    losses = _active.get()
    passage = None if losses is None else _Passage(losses, logits, top_k, balance_coefficient, z_coefficient)
    # Also without the context: where a backward computes activations anew, it must save what the forward saved.
    passed: Tensor = _Passed.apply(logits, passage)
    return passed


class _Passage:
    """What the backward of a router's losses needs besides the logits. Those may be computed anew, this is not."""

    def __init__(
        self, losses: RouterLosses, logits: Tensor, top_k: int, balance_coefficient: float, z_coefficient: float
    ) -> None:
        self._losses = losses
        self._coefficients = balance_coefficient, z_coefficient
        flat = _flat(logits.detach())
        weights = flat.new_ones(len(flat)) if losses.counted is None else _as_many(losses.counted, len(flat)).to(flat)
        self._weights = weights[:, None] / weights.sum().clamp(min=1.0)
        chosen = torch.zeros_like(flat).scatter_(-1, flat.topk(top_k, -1).indices, 1 / top_k)
        self._shares = (self._weights * chosen).sum(0)
        balance = flat.shape[-1] * (self._shares * (self._weights * flat.softmax(-1)).sum(0)).sum()
        z = (self._weights * flat.logsumexp(-1, keepdim=True).square()).sum()
        losses._found.append(torch.stack([balance, z]))

    def gradient(self, logits: Tensor) -> Tensor:
        """Of the losses with respect to the logits, in their shape."""
        flat = _flat(logits)
        probabilities = flat.softmax(-1)
        balance_coefficient, z_coefficient = self._coefficients
        of_probabilities = balance_coefficient * flat.shape[-1] * self._shares
        of_balance = of_probabilities - (probabilities * of_probabilities).sum(-1, keepdim=True)
        of_z = 2 * z_coefficient * flat.logsumexp(-1, keepdim=True)
        factor = self._losses.scale * self._losses.tokens
        return (factor * self._weights * probabilities * (of_balance + of_z)).view_as(logits)


def _flat(logits: Tensor) -> Tensor:
    return logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))


def _as_many(counted: Tensor, tokens: int) -> Tensor:
    if counted.numel() != tokens:
        raise InputError(
            f"the tokens counted in routers' losses have the shape {tuple(counted.shape)}, and a router got {tokens}"
            " tokens; needed is a bool for each"
        )
    return counted.flatten()


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, passage: _Passage | None) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.passage = passage
        return logits.view_as(logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        if ctx.passage is None:
            return gradient, None
        return gradient + ctx.passage.gradient(logits).to(gradient.dtype), None


class _Followed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, losses: RouterLosses) -> Tensor:
        ctx.losses = losses
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.losses.scale = gradient
        return gradient, None
