"""A mixture of experts in plain PyTorch, for models to be made of: no token is dropped, each device runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipe._compat.torch import FakeTensor
from lightning_pipe.engine.common.options import check_whole_number
from lightning_pipe.llm.losses.router_losses import attach_router_losses

# Results of experts, from tokens sorted by expert and the number of tokens of each expert.
ExpertsFn = Callable[[Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """Feed-forward networks side by side, each ``down(silu(gate(x)) * up(x))`` (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.up = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Each expert's weights as ``nn.Linear`` draws its own."""
        for weight in (self.gate, self.up, self.down):
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Let each expert work on its tokens."""
        device = tokens.device.type
        weights = [
            weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.gate, self.up, self.down)
        ]
        if torch.is_autocast_enabled(device) and tokens.dtype != torch.float64:
            tokens, *weights = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (tokens, *weights))
        if _can_use_grouped_mm(tokens, weights):
            multiply = partial(_grouped_linear, ends=counts.cumsum(0).to(torch.int32))
        else:
            # A run without data finds shapes, which are the same whoever gets the tokens.
            fake = isinstance(counts, FakeTensor)
            multiply = partial(
                _apply_linear_per_expert, sizes=[len(tokens)] + [0] * (len(counts) - 1) if fake else counts.tolist()
            )
        gate, up, down = weights
        return multiply(F.silu(multiply(tokens, gate)) * multiply(tokens, up), down)


class MoE(nn.Module):
    """Sends each token to the ``top_k`` of ``num_experts`` networks that a router finds most probable for it.

    A token's result is the sum of its experts' results times their probabilities, which are made to add up to 1 (with
    ``top_k=1`` they stay what they are, as in Switch Transformer, or the router would not learn from the result).

    The router's losses, and what its coefficients mean, are those of
    :func:`~lightning_pipe.llm.losses.router_losses.attach_router_losses`; they have an effect inside a
    :class:`~lightning_pipe.llm.losses.router_losses.RouterLosses` only, which the pipeline's stages and
    ``PipelineModule`` enter. The router works in its weight's own type, also under autocast, as Switch Transformer
    found necessary.

    Args:
        dim: width of tokens.
        hidden_dim: width inside each expert.
        num_experts: number of experts.
        top_k: number of experts of each token.
        balance_coefficient: coefficient of the load-balancing loss (default 0.01, as in Switch Transformer).
        z_coefficient: coefficient of the router's z-loss (default 0.001, as in ST-MoE).

    Attributes:
        exchange: function that runs experts on several ranks; None if all experts are on this rank. See
            :func:`~lightning_pipe.llm.parallel.expert_parallel.apply_expert_parallel`.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        top_k: int,
        *,
        balance_coefficient: float = 0.01,
        z_coefficient: float = 0.001,
    ) -> None:
        super().__init__()
        check_whole_number("top_k of the MoE", top_k, 1)
        self.num_experts = num_experts
        self.top_k = top_k
        self.balance_coefficient = balance_coefficient
        self.z_coefficient = z_coefficient
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = Experts(dim, hidden_dim, num_experts)
        self.exchange: Callable[[ExpertsFn, Tensor, Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Each token's sum over its experts, in the shape and type of ``x``: (..., dim)."""
        tokens = x.reshape(-1, x.shape[-1])
        chosen, weights = self._route(tokens)
        run: ExpertsFn = self.experts if self.exchange is None else partial(self.exchange, self.experts)
        return dispatch_and_combine(run, tokens, chosen, weights, self.num_experts).view_as(x)

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each token, and what their results are multiplied by: (tokens, top_k)."""
        with torch.autocast(tokens.device.type, enabled=False):
            logits = attach_router_losses(
                self.router(tokens.to(self.router.weight.dtype)),
                self.top_k,
                balance_coefficient=self.balance_coefficient,
                z_coefficient=self.z_coefficient,
            )
        chosen = logits.topk(self.top_k, -1).indices
        weights = logits.softmax(-1, torch.promote_types(logits.dtype, torch.float32)).gather(-1, chosen)
        return chosen, weights if self.top_k == 1 else weights / weights.sum(-1, keepdim=True)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}"


def dispatch_and_combine(run: ExpertsFn, tokens: Tensor, chosen: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """Sum of the results of each token's experts, in the type of the tokens."""
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(order))
    results = run(tokens[order // chosen.shape[-1]], counts)
    by_token = results[order.argsort()].view(*chosen.shape, tokens.shape[-1])
    return (by_token * weights[..., None]).sum(1).to(tokens.dtype)


def _can_use_grouped_mm(tokens: Tensor, weights: Sequence[Tensor]) -> bool:
    """Return True if ``grouped_mm`` takes these types and sizes: whole units of 16 bytes, on a GPU from Ampere on."""
    if isinstance(tokens, FakeTensor) or any(weight.dtype != tokens.dtype for weight in weights):
        return False
    if tokens.is_cuda and torch.cuda.get_device_capability(tokens.device) < (8, 0):
        return False
    # Compiled, it takes one type only.
    types = (torch.bfloat16,) if torch.compiler.is_compiling() else (torch.float32, torch.float16, torch.bfloat16)
    aligned = all(size * weight.element_size() % 16 == 0 for weight in weights for size in weight.shape[1:])
    return tokens.device.type in ("cpu", "cuda") and tokens.dtype in types and aligned


def _grouped_linear(tokens: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    results = F.grouped_mm(tokens, matrices.mT, offs=ends)
    if results.requires_grad:
        # Its backward refuses expanded gradients, such as those of a sum.
        results.register_hook(Tensor.contiguous)
    return results


def _apply_linear_per_expert(tokens: Tensor, matrices: Tensor, sizes: list[int]) -> Tensor:
    # Also experts without a token, so that their gradients are zeros: data-parallel ranks wait for each other's.
    parts = zip(tokens.split(sizes), matrices.unbind(), strict=True)
    return torch.cat([F.linear(part, matrix) for part, matrix in parts])
