"""Load-balancing loss of Hugging Face's mixtures of experts, over all layers of a micro-batch.

``load_balancing_loss_func`` multiplies each expert's share of the choices by its mean probability, both averaged over
all layers. A stage knows those of its own layers, so stages add up the sums and send them on with the hidden states::

    stage 0: hidden states, sums of layers 0-1 ──► stage 1: hidden states, sums of layers 0-3 ──► loss on the last stage

The gradients come back the same way. The loss and its gradients are those of the unsplit model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipe.engine.common.errors import SetupError

_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass(frozen=True)
class BalanceLoss:
    """Loss that a model adds to its own if its config has ``output_router_logits=True``."""

    coefficient: float
    top_k: int
    experts: int

    @staticmethod
    def from_model(model: nn.Module) -> BalanceLoss | None:
        """Loss of a Hugging Face causal LM, or of a part of it; None if its config does not enable it."""
        coefficient = getattr(model, "router_aux_loss_coef", None) or getattr(model, "aux_loss_coef", None)
        if not getattr(model.config, "output_router_logits", False) or not coefficient:
            return None
        function = getattr(sys.modules.get(type(model).__module__), "load_balancing_loss_func", None)
        if function is None or list(inspect.signature(function).parameters) != _ARGUMENTS:
            raise SetupError(
                f"the config has output_router_logits=True and a coefficient of {coefficient}, but the router loss of"
                f" {type(model).__name__} is not transformers' load_balancing_loss_func({', '.join(_ARGUMENTS)}), which"
                " is the only one that stages compute. Set output_router_logits=False, and call"
                " lightning_pipe.llm.model.hf_experts.register_router_loss_hooks in build_model. It adds"
                " losses to each router"
            )
        return BalanceLoss(coefficient, model.num_experts_per_tok, model.num_experts)  # type: ignore[arg-type]

    def create_zero_sums(self, device: torch.device) -> Tensor:
        """Sums of no layer. They always have a gradient, whether or not a stage has a router."""
        return torch.zeros(2 * self.experts + 1, device=device, requires_grad=torch.is_grad_enabled())

    def add_router_logits_to_sums(
        self, total: Tensor, router_logits: Sequence[Tensor], counted: Tensor | None
    ) -> Tensor:
        """Sums over tokens and more layers: choices and probabilities of each expert, and the number of tokens."""
        total = total.clone()
        for logits in router_logits:
            probabilities = logits.softmax(-1)
            choices = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(self.top_k, -1).indices, 1)
            weights = torch.ones_like(probabilities[:, :1]) if counted is None else counted.reshape(-1, 1)
            sums = (weights.to(total) * torch.cat([choices, probabilities], -1)).sum(0)
            total = total + torch.cat([sums, weights.to(total).sum(0)])
        return total

    def compute_from_sums(self, sums: Tensor) -> Tensor:
        """Loss of the sums of all layers, including the coefficient."""
        choices, probabilities, tokens = sums.split([self.experts, self.experts, 1])
        tokens = tokens.detach().clamp(min=1)
        return self.coefficient * self.experts * (choices.detach() / tokens * (probabilities / tokens)).sum()

    @staticmethod
    @contextmanager
    def capture_router_logits(base: nn.Module) -> Generator[list[Tensor], None, None]:
        """Context that moves the router logits from the results of a base model into a list."""
        captured: list[Tensor] = []

        def capture_router_logits_hook(module: nn.Module, args: Any, output: Any) -> None:
            if hasattr(output, "router_logits"):
                captured.extend(output.router_logits or ())
                output["router_logits"] = None  # otherwise the model would compute the loss of its own layers

        handle = base.register_forward_hook(capture_router_logits_hook)
        try:
            yield captured
        finally:
            handle.remove()
