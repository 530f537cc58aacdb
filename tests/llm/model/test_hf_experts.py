"""Hugging Face's routers get losses without a change to their models, and shapes are found without data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, PretrainedConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.llm.losses.router_losses import RouterLosses, attach_router_losses, sum_router_losses
from lightning_pipe.llm.model.derived_config import derive_pp_module_config
from lightning_pipe.llm.model.hf_experts import make_experts_pass_through, register_router_loss_hooks
from lightning_pipe.llm.model.meta_tensors import fake_copy
from lightning_pipe.llm.model.shapes import StageShapes
from lightning_pipe.llm.model.stage_module import copy_model_sharing_tensors, make_stage_module
from lightning_pipe.llm.split.stage_fqns import split_layers_evenly
from tests.rounding import Reference

KINDS: list[type[PretrainedConfig]] = [MixtralConfig, Qwen3MoeConfig, OlmoeConfig]
EXPERTS, TOKENS = 4, 7


def make_hf(kind: type[PretrainedConfig], layers: int) -> Any:
    """A tiny mixture of experts: 4 of them, 2 for a token."""
    options: dict[str, Any] = {"num_local_experts" if kind is MixtralConfig else "num_experts": EXPERTS}
    if kind is Qwen3MoeConfig:
        options |= {"moe_intermediate_size": 12, "head_dim": 4}
    make: Any = kind
    config = make(
        vocab_size=17,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.3,
        **options,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def hf_gradients(model: Any, **keywords: Any) -> tuple[dict[str, Tensor], Tensor]:
    ids = torch.randint(17, (2, 9), generator=torch.Generator().manual_seed(3))
    output = model(input_ids=ids, use_cache=False, **keywords)
    aux = output.aux_loss if keywords else torch.zeros(())
    (output.logits.logsumexp(-1).sum() + model.config.router_aux_loss_coef * TOKENS * aux).backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}, aux


@pytest.mark.parametrize("kind", KINDS)
def test_a_tapped_layer_of_hugging_face_has_the_loss_of_its_model(kind: type[PretrainedConfig]) -> None:
    def untapped() -> dict[str, Any]:
        gradients, aux = hf_gradients(make_hf(kind, 1), output_router_logits=True)
        return {"balance": aux / 2, **gradients}

    expected = Reference.of(untapped)
    model = make_hf(kind, 1)
    register_router_loss_hooks(model, balance_coefficient=model.config.router_aux_loss_coef * 2)
    with RouterLosses(TOKENS) as losses:
        found, _ = hf_gradients(model)
    balance, _, count = sum_router_losses([losses]).tolist()
    found["balance"] = torch.tensor(balance / count)
    assert expected.differences(found) == []
    assert found.keys() == expected.values.keys()


def test_a_router_that_returns_something_else_is_named() -> None:
    class Router(nn.Linear):
        pass

    block = nn.Module()
    block.gate, block.experts = Router(8, EXPERTS), nn.ModuleList()
    register_router_loss_hooks(nn.Sequential(block), balance_coefficient=0.1)
    with pytest.raises(InputError, match=r"Router returned Tensor; expected a tuple of its logits, and of the weights"):
        block.gate(torch.ones(2, 8))


def test_of_several_layers_hugging_face_multiplies_means_over_layers_and_no_layer_has_that_loss_by_itself() -> None:
    logits = torch.zeros(2, 8, EXPERTS)
    logits[0, :, 0], logits[1, :, 1] = 9.0, 9.0
    together = load_balancing_loss_func(tuple(logits), EXPERTS, 1)
    with RouterLosses(1) as losses:
        for layer in logits:
            attach_router_losses(layer, 1)
    balance, _, count = sum_router_losses([losses]).tolist()
    # Each layer sends all to one expert, and together they look half balanced. The other three are probable by
    # exp(-9) to 1, which is 3.7e-4 of all.
    assert float(together) == pytest.approx(2.0, rel=4e-4)
    assert balance / count == pytest.approx(4.0, rel=4e-4)


def test_a_model_without_routers_cannot_be_tapped() -> None:
    with pytest.raises(SetupError, match="Sequential has no module with experts and a gate or router"):
        register_router_loss_hooks(nn.Sequential(nn.Linear(2, 2)), balance_coefficient=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_of_stages_with_experts_are_found_without_data(kind: type[PretrainedConfig]) -> None:
    fake, mode = fake_copy(make_hf(kind, 2))
    make_experts_pass_through(fake)
    config = derive_pp_module_config(fake)
    stages = [
        make_stage_module(copy_model_sharing_tensors(fake), config, names, index, 2).eval()
        for index, names in enumerate(split_layers_evenly(config, 2))
    ]
    first, last = StageShapes(stages, mode).infer((torch.zeros(2, 5, dtype=torch.long),), {})
    assert first.outputs[0].shape == last.inputs[0].shape == (2, 5, 8)
    assert last.outputs[0].shape == (2, 5, 17)
