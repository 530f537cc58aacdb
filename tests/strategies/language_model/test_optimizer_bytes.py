"""Bytes of optimizers' states, without a model that has any memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.model.meta_tensors import parameters_on_meta
from lightning_pipe.strategies.language_model.optimizer_bytes import (
    compute_optimizer_bytes_per_piece,
    sum_by_model_piece,
)
from tests.strategies.llm_cases import Tiny, TinyLM


class Trained(Tiny):
    """With an optimizer, or what else configure_optimizers may give, that the test makes."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self)


def really(make: Any) -> dict[str, int]:
    """What the states come to for a real model, by parameter."""
    module = Trained(make)
    module.configure_model()
    assert module.model is not None
    configured = module.configure_optimizers()
    optimizers = configured if isinstance(configured, list) else [configured]
    for one in module.model.parameters():
        one.grad = torch.ones_like(one) if one.requires_grad else None
    sizes: dict[int, int] = {}
    for optimizer in optimizers:
        optimizer.step()
        for parameter, state in optimizer.state.items():
            sizes[id(parameter)] = sum(one.nbytes for one in state.values() if isinstance(one, torch.Tensor))
    return {name: sizes.get(id(one), 0) for name, one in module.model.named_parameters()}


def two(module: Tiny) -> Any:
    first, *others = module.parameters()
    return [torch.optim.SGD([first], 0.1), torch.optim.AdamW(others, 0.1)]


MAKERS = {
    "adamw": lambda module: torch.optim.AdamW(module.parameters()),
    "sgd": lambda module: torch.optim.SGD(module.parameters(), 0.1),
    "momentum": lambda module: torch.optim.SGD(module.parameters(), 0.1, momentum=0.9),
    "amsgrad": lambda module: torch.optim.Adam(module.parameters(), amsgrad=True),
    "factored": lambda module: torch.optim.Adafactor(module.parameters()),
    "of two": two,
}


@pytest.mark.parametrize("kind", MAKERS)
def test_bytes_are_those_of_a_real_model(kind: str) -> None:
    with parameters_on_meta():
        module = Trained(MAKERS[kind])
        module.configure_model()
    assert module.model is not None
    config = derive_pp_module_config(module.model)
    assert compute_optimizer_bytes_per_piece(module, config) == sum_by_model_piece(really(MAKERS[kind]), config)
    assert all(one.is_meta for one in module.model.parameters())


def test_what_a_parameter_is_marked_with_is_seen() -> None:
    class Marked(TinyLM):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight.slow = True  # type: ignore[attr-defined]

    module = Trained(lambda one: torch.optim.Adam([p for p in one.parameters() if getattr(p, "slow", False)]))
    with parameters_on_meta():
        module.model = Marked()
    found = compute_optimizer_bytes_per_piece(module, derive_pp_module_config(module.model))
    assert found.layers == (0, 0, 0, 0)
    assert found.output > 0
