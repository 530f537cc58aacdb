"""Hugging Face's mixtures of experts (such as Mixtral, Qwen3-MoE and OLMoE), detected by the attributes of blocks."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.losses.router_losses import pass_router_logits
from lightning_pipe.llm.model.moe import MoE

__all__ = ["has_routers", "skip_experts", "tap_routers"]


def tap_routers(model: nn.Module, *, balance_coefficient: float, z_coefficient: float = 0.0) -> None:
    """Give a model's routers the losses of :func:`~lightning_pipe.llm.losses.router_losses.pass_router_logits`.

    Call it on the model before it is split, or trained: each block's ``gate`` gets a forward hook.

    The loss is computed for each layer separately, as in the papers. It differs from ``load_balancing_loss_func``,
    which such a model adds to its own loss when ``output_router_logits`` is set: that function averages shares and
    probabilities over all layers, and *then* multiplies them. Every layer's gradient then depends on the shares of all
    other layers, which the stages of a pipeline do not have. For a single layer the two losses differ only by a factor:
    Hugging Face's is ``top_k`` times this one. A coefficient of the same strength is therefore
    ``router_aux_loss_coef * top_k / number of layers``.

    Raises:
        SetupError: the model has no such blocks.
    """

    def of(top_k: int) -> Any:
        def hook(gate: nn.Module, args: Any, logits: Tensor) -> Tensor:
            return pass_router_logits(
                logits, top_k, balance_coefficient=balance_coefficient, z_coefficient=z_coefficient
            )

        return hook

    blocks = _blocks(model)
    if not blocks:
        raise SetupError(
            f"{type(model).__name__} has no module with gate, experts and top_k; expected a Hugging Face mixture of"
            " experts, whose blocks have them"
        )
    for block in blocks:
        block.gate.register_forward_hook(of(block.top_k))


def has_routers(model: nn.Module) -> bool:
    """Return True if a model has a mixture of experts, either Hugging Face's or :class:`MoE`."""
    return bool(_blocks(model)) or any(isinstance(module, MoE) for module in model.modules())


def skip_experts(model: nn.Module) -> None:
    """Make the blocks of a model without data return their input.

    Routing depends on values, so the blocks cannot run on fake tensors
    (:func:`~lightning_pipe.llm.model.deferred.fake_copy`). Their output has the shape of their input. A model without
    such blocks is not changed.
    """
    for block in _blocks(model):
        block.forward = _pass_on


def _pass_on(hidden_states: Tensor) -> tuple[Tensor, None]:
    """Result of a block that returns its input, without router logits."""
    return hidden_states, None


def _blocks(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if all(hasattr(module, name) for name in ("gate", "experts", "top_k"))]
