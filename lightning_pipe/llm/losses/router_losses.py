"""Losses of the routers of a mixture of experts, whose gradients are added at the routers, not at the model's end.

A router in the middle of a pipeline cannot add its losses to the main loss, which is on another stage::

    router ──► unchanged logits ──► experts ──► ... ──► main loss
    router ◄── gradient of the main loss plus gradient of the router's losses ◄── ...

The caller of the forward sets the weight of the losses by entering a :class:`RouterLosses` around it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar, Token
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_pipe.engine.common.errors import InputError


class RouterLosses:
    """Context around the forward of a micro-batch that weights and records its routers' losses.

    All gradients are those of a loss summed over tokens, and are divided once, at the end of the step, by the total
    number of tokens. A router's loss is a mean, so it is multiplied by the number of tokens of its micro-batch. The
    trained loss is the mean of the main loss plus, for each router, the coefficient times the token-weighted mean of
    its losses.

    Enter the context around forwards only, once for each stage that the micro-batch passes on a rank. Backwards need no
    context, even if they recompute activations (``torch.utils.checkpoint``, but not its reentrant variant, whose first
    forward runs without gradients): recomputed losses are not recorded again.

    Args:
        tokens: number of the micro-batch's loss tokens in this rank's part of the sequences.
        token_mask: bool for each token, True for tokens that the losses average over (default None: all tokens). The
            shape is that of the layers' inputs without the last dimension. Exclude padding, since identical tokens
            would all go to the same experts.
        scale: factor of the main loss in its backward, such as a loss scale for fp16 (default 1.0).
            :meth:`scale_with_loss` sets it.
    """

    def __init__(self, tokens: int, *, token_mask: Tensor | None = None, scale: float | Tensor = 1.0) -> None:
        self.tokens = tokens
        self.token_mask = token_mask
        self.scale = scale
        self._recorded: list[Tensor] = []
        self._token: Token[RouterLosses | None] | None = None

    def __enter__(self) -> RouterLosses:
        self._token = _active.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _active.reset(self._token)

    def scale_with_loss(self, loss: Tensor) -> Tensor:
        """Return the main loss unchanged, and set the scale of the routers' losses in its backward, which runs first.

        Use it for a main loss on the same device that is divided or scaled later.
        """
        followed: Tensor = _SetScaleFromLossGrad.apply(loss, self)
        return followed


_active: ContextVar[RouterLosses | None] = ContextVar("router losses", default=None)


def current_router_losses() -> RouterLosses | None:
    """The context of the running forward; None outside of one."""
    return _active.get()


def sum_router_losses(micro_batches: Iterable[RouterLosses]) -> Tensor:
    """Token-weighted sums of the routers' losses, to be summed over ranks and divided into means."""
    total = torch.zeros(3, dtype=torch.float64)
    for losses in micro_batches:
        if losses._recorded:
            sums = torch.stack(losses._recorded).cpu().double().sum(0)
            total += losses.tokens * torch.cat([sums, torch.tensor([len(losses._recorded)])])
    return total


# Compiled code could not depend on the active context.
@torch.compiler.disable
def attach_router_losses(
    logits: Tensor,
    top_k: int,
    *,
    balance_coefficient: float = 0.0,
    z_coefficient: float = 0.0,
    weights: Tensor | None = None,
    selected_experts: Tensor | None = None,
) -> Tensor:
    """Return a router's logits or weights unchanged, and add the gradients of its losses in the backward.

    Of E experts, expert e gets the share f(e) of the choices (k for each token), and P(e) is its mean probability. The
    load-balancing loss is E times the sum of f(e) P(e) (Switch Transformer, arXiv 2101.03961, equations 4 to 6, with f
    over k choices); only P has a gradient. The z-loss is the mean of the logits' squared log-sum-exp (ST-MoE, arXiv
    2202.08906, equation 5). Both are computed in float32, each for this call alone: this layer, this micro-batch.

    Outside a :class:`RouterLosses` the losses have no effect.

    Args:
        logits: logits of the router, (..., experts).
        top_k: see :class:`~lightning_pipe.llm.model.moe.MoE`, also for *balance_coefficient* and *z_coefficient*
            (default 0).
        weights: tensor that is returned in place of the logits, for a router whose logits are used no further, only
            weights that it computed from them (default None: the logits).
        selected_experts: experts of each token, (..., top_k) (default None: those with the largest logits).

    Raises:
        InputError: ``token_mask`` does not have one value for each of the logits' tokens.
    """
    losses = _active.get()
    # Without a context, too: when a layer is recomputed, it must choose as often and save the same tensors as before.
    experts = logits.detach().topk(top_k, -1).indices if selected_experts is None else selected_experts
    passage = None
    if losses is not None:
        passage = _RouterLossState(losses, logits, experts, balance_coefficient, z_coefficient)
    passed: Tensor = _AttachRouterLosses.apply(logits, weights, passage)
    return passed


class _RouterLossState:
    """Data for the backward of a router's losses other than the logits, which may be recomputed."""

    def __init__(
        self, losses: RouterLosses, logits: Tensor, chosen: Tensor, balance_coefficient: float, z_coefficient: float
    ) -> None:
        self._losses = losses
        self._coefficients = balance_coefficient, z_coefficient
        flat = _flatten_logits_as_float32(logits.detach())
        weights = (
            flat.new_ones(len(flat))
            if losses.token_mask is None
            else _flat_token_mask(losses.token_mask, len(flat)).to(flat)
        )
        self._weights = weights[:, None] / weights.sum().clamp(min=1.0)
        shares = torch.zeros_like(flat).scatter_(-1, chosen.flatten(0, -2), 1 / chosen.shape[-1])
        self._shares = (self._weights * shares).sum(0)
        balance = flat.shape[-1] * (self._shares * (self._weights * flat.softmax(-1)).sum(0)).sum()
        z = (self._weights * flat.logsumexp(-1, keepdim=True).square()).sum()
        losses._recorded.append(torch.stack([balance, z]))

    def compute_logits_gradient(self, logits: Tensor) -> Tensor:
        """Gradient of the losses with respect to the logits, in their shape."""
        flat = _flatten_logits_as_float32(logits)
        probabilities = flat.softmax(-1)
        balance_coefficient, z_coefficient = self._coefficients
        grad_probabilities = balance_coefficient * flat.shape[-1] * self._shares
        grad_balance = grad_probabilities - (probabilities * grad_probabilities).sum(-1, keepdim=True)
        grad_z = 2 * z_coefficient * flat.logsumexp(-1, keepdim=True)
        factor = self._losses.scale * self._losses.tokens
        return (factor * self._weights * probabilities * (grad_balance + grad_z)).view_as(logits)


def _flatten_logits_as_float32(logits: Tensor) -> Tensor:
    return logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))


def _flat_token_mask(counted: Tensor, tokens: int) -> Tensor:
    if counted.numel() != tokens:
        raise InputError(
            f"the tokens counted in routers' losses have the shape {tuple(counted.shape)}, and a router got {tokens}"
            " tokens; expected one bool for each token"
        )
    return counted.flatten()


class _AttachRouterLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, weights: Tensor | None, passage: _RouterLossState | None) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.passage, ctx.has_weights = passage, weights is not None
        passed = logits if weights is None else weights
        return passed.view_as(passed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (logits,) = ctx.saved_tensors
        grad_losses = None if ctx.passage is None else ctx.passage.compute_logits_gradient(logits).to(logits.dtype)
        if ctx.has_weights:
            return grad_losses, gradient, None
        return gradient if grad_losses is None else gradient + grad_losses, None, None


class _SetScaleFromLossGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, losses: RouterLosses) -> Tensor:
        ctx.losses = losses
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.losses.scale = gradient
        return gradient, None
