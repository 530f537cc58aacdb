"""Hugging Face's mixtures of experts (such as Mixtral, Qwen3-MoE and OLMoE), detected by the names in their blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.llm.losses.router_losses import attach_router_losses
from lightning_pipe.llm.model.moe import ExpertsFn, MoE, dispatch_and_combine


def register_router_loss_hooks(model: nn.Module, *, balance_coefficient: float, z_coefficient: float = 0.0) -> None:
    """Give a model's routers the losses of :func:`~lightning_pipe.llm.losses.router_losses.attach_router_losses`.

    Call it on the model before it is split, or trained: each block's router gets a forward hook.

    The loss is computed for each layer separately, as in the papers. It differs from ``load_balancing_loss_func``,
    which ``output_router_logits`` enables, and which averages shares and probabilities over all layers before it
    multiplies them. If both are enabled, both are added. For a single layer the two losses differ only by a factor:
    Hugging Face's is ``top_k`` times this one. A coefficient of the same strength is therefore
    ``router_aux_loss_coef * top_k / number of layers``.

    Raises:
        SetupError: the model has no such blocks.
        InputError: in the forward, a router that returns something else than transformers' routers do.
    """

    def attach_router_losses_hook(router: nn.Module, args: Any, results: Any) -> Any:
        if not (isinstance(results, tuple) and len(results) == 3):
            raise InputError(
                f"{type(router).__name__} returned {type(results).__name__}; expected a tuple of its logits, and of the"
                " weights and numbers of the experts of each token, as from transformers' routers. Call"
                " attach_router_losses in the router instead"
            )
        logits, weights, chosen = results
        weights = attach_router_losses(
            logits,
            chosen.shape[-1],
            balance_coefficient=balance_coefficient,
            z_coefficient=z_coefficient,
            weights=weights,
            selected_experts=chosen,
        )
        return logits, weights, chosen

    routers = [router for router, _ in _find_routers_and_experts(model)]
    if not routers:
        raise SetupError(
            f"{type(model).__name__} has no module with experts and a gate or router; expected a Hugging Face mixture"
            " of experts, whose blocks have them"
        )
    for router in routers:
        router.register_forward_hook(attach_router_losses_hook)


def has_routers(model: nn.Module) -> bool:
    """Return True if a model has a mixture of experts, either Hugging Face's or :class:`MoE`."""
    return bool(_find_routers_and_experts(model)) or any(isinstance(module, MoE) for module in model.modules())


def make_experts_pass_through(model: nn.Module) -> None:
    """Make the experts of a model without data return their input, since the tokens of an expert depend on values."""
    for _, experts in _find_routers_and_experts(model):
        experts.forward = _identity_forward


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Experts of each mixture of a model, Hugging Face's or :class:`MoE`, by name."""
    expert_ids = {id(experts) for _, experts in _find_routers_and_experts(model)}
    return {name: module for name, module in model.named_modules() if id(module) in expert_ids}


def experts_take_all_tokens(experts: nn.Module) -> bool:
    """Return True for experts such as Llama 4's, which get a row for each expert and token, zeros where not chosen."""
    weight = next(experts.parameters(recurse=False), None)  # which lists of experts have not
    return weight is not None and list(signature(type(experts).forward).parameters) == ["self", "hidden_states"]


def run_expert_parallel_forward(
    experts: nn.Module,
    exchange: Callable[[ExpertsFn, Tensor, Tensor], Tensor],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Forward of experts that several ranks share, with the class's own computation of the experts."""
    twin = _copy_with_local_weights(experts)

    def compute_local_experts(tokens: Tensor, counts: Tensor) -> Tensor:
        index, rows = _get_expert_of_each_token(tokens, counts), len(tokens)
        if not rows:
            # One row of zeros, so that weights get gradients of zeros: data-parallel ranks wait for each other's.
            index, tokens = counts.new_zeros(1), torch.cat([tokens, tokens.new_zeros(1, tokens.shape[1])])
        results: Tensor = type(experts).forward(twin, tokens, index[:, None], tokens.new_ones(len(tokens), 1))
        return results[:rows]

    number = len(next(experts.parameters()))  # of all ranks: a DTensor has the whole shape
    return dispatch_and_combine(
        partial(exchange, compute_local_experts), hidden_states, top_k_index, top_k_weights, number
    )


def run_batched_expert_parallel_forward(
    experts: nn.Module, exchange: Callable[[ExpertsFn, Tensor, Tensor], Tensor], hidden_states: Tensor
) -> Tensor:
    """As :func:`run_expert_parallel_forward`, for experts that take all tokens; rows of zeros are not sent."""
    twin = _copy_with_local_weights(experts)

    def compute_local_experts(tokens: Tensor, counts: Tensor) -> Tensor:
        # The class takes the same number of rows for each expert.
        most = max(int(counts.max()), 1)
        shift = most * torch.arange(len(counts), device=counts.device) - (counts.cumsum(0) - counts)
        place = torch.arange(len(tokens), device=tokens.device) + shift[_get_expert_of_each_token(tokens, counts)]
        rows = tokens.new_zeros(len(counts) * most, tokens.shape[1]).index_copy(0, place, tokens)
        results: Tensor = type(experts).forward(twin, rows)
        return results[place]

    used = hidden_states.detach().any(-1)
    number = len(next(experts.parameters()))
    results = exchange(compute_local_experts, hidden_states[used], used.view(number, -1).sum(1))
    return torch.zeros_like(hidden_states, dtype=results.dtype).index_copy(0, used.nonzero().flatten(), results)


def _copy_with_local_weights(experts: nn.Module) -> Any:
    """A copy with plain tensors as its weights: the class indexes them, and FSDP's hooks belong to the original."""
    local = {
        name: weight.to_local() if isinstance(weight, DTensor) else weight
        for name, weight in experts.named_parameters()
    }
    twin: Any = object.__new__(type(experts))
    twin.__dict__ = {**vars(experts), "_parameters": {}, "num_experts": len(next(iter(local.values()))), **local}
    return twin


def _get_expert_of_each_token(tokens: Tensor, counts: Tensor) -> Tensor:
    index = torch.arange(len(counts), device=tokens.device)
    return index.repeat_interleave(counts, output_size=len(tokens))


def _identity_forward(hidden_states: Tensor, *args: Any, **keywords: Any) -> Tensor:
    return hidden_states


def _find_routers_and_experts(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Router and experts of each mixture, which transformers' classes call by one of two names."""
    blocks = []
    for module in model.modules():
        children = dict(module.named_children())
        router = children.get("gate") or children.get("router")
        if router is not None and "experts" in children:
            blocks.append((router, children["experts"]))
    return blocks
