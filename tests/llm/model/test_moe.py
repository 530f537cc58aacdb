"""A mixture of experts sends every token to its most probable experts, and adds up what they make of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.deferred import deferred_init, fake_copy
from lightning_pipe.llm.model.moe import MoE
from lightning_pipe.llm.model.shapes import StageShapes
from tests.rounding import Reference

WIDTH, HIDDEN, EXPERTS = 6, 10, 4


def make_layer(top_k: int = 2, **options: Any) -> MoE:
    torch.manual_seed(1)
    return MoE(WIDTH, HIDDEN, EXPERTS, top_k, **options)


def inputs() -> Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(2))


def each_token_alone(layer: MoE, x: Tensor) -> Tensor:
    rows = []
    for token in x.flatten(0, 1):
        probabilities = F.linear(token, layer.router.weight).softmax(0)
        chosen = probabilities.argsort(descending=True)[: layer.top_k].tolist()
        total = sum(probabilities[expert] for expert in chosen) if layer.top_k > 1 else 1.0
        row = torch.zeros_like(token)
        for expert in chosen:
            gate, up, down = (weight[expert] for weight in (layer.experts.gate, layer.experts.up, layer.experts.down))
            row = row + probabilities[expert] / total * (down @ (F.silu(gate @ token) * (up @ token)))
        rows.append(row)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_a_token_becomes_the_sum_of_its_experts_results(top_k: int) -> None:
    def results(function: Callable[[MoE, Tensor], Tensor]) -> dict[str, Any]:
        layer, x = make_layer(top_k), inputs().requires_grad_()
        output = function(layer, x)
        output.square().sum().backward()
        return {"output": output, "input": x.grad} | {name: one.grad for name, one in layer.named_parameters()}

    expected = Reference.of(lambda: results(each_token_alone))
    assert expected.differences(results(lambda layer, x: layer(x))) == []


def test_experts_without_tokens_have_gradients_of_zero() -> None:
    layer = make_layer(1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2, 0] = 1.0
    x = inputs()
    x[..., 0] = x[..., 0].abs() + 1.0
    layer(x).square().sum().backward()
    for weight in layer.experts.parameters():
        assert weight.grad is not None
        assert [bool(one.any()) for one in weight.grad] == [False, False, True, False]
    layer.zero_grad()
    layer(x[:0]).sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in layer.parameters())


def test_each_expert_is_initialised_as_a_linear_layer_is() -> None:
    weights = make_layer().experts
    for weight, fan_in in ((weights.gate, WIDTH), (weights.up, WIDTH), (weights.down, HIDDEN)):
        assert weight.abs().max() <= fan_in**-0.5
        assert float(weight.detach().std()) == pytest.approx((3 * fan_in) ** -0.5, rel=0.15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_router_stays_exact_and_the_experts_do_not(dtype: torch.dtype) -> None:
    layer, x = make_layer(), inputs()
    seen: list[torch.dtype] = []
    layer.router.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    layer.experts.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    with torch.autocast("cpu", dtype):
        output = layer(x)
    assert seen == [torch.float32, dtype]
    assert output.dtype == x.dtype
    # Ten values are rounded to this type: the input twice and each matrix, the products with these three, SiLU's result
    # and its product with the other. SiLU's slope is below 1.1. Products are summed in float32, as is the mean over
    # experts, which is at most the largest of them.
    gate, up, down = (weight.detach().abs() for weight in layer.experts.parameters())
    hidden = torch.einsum("ehd,bld->bleh", gate, x.abs()) * torch.einsum("ehd,bld->bleh", up, x.abs())
    magnitude = 1.1 * torch.einsum("edh,bleh->bled", down, hidden).amax(2)
    unit = torch.finfo(dtype).eps / 2
    assert ((output - layer(x)).abs() <= ((1 + unit) ** 10 - 1) * magnitude).all()


def test_shapes_are_found_without_data() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), make_layer())
    fake, mode = fake_copy(model)
    (shape,) = StageShapes([fake], mode).of((inputs(),), {})
    assert shape.outputs[0].shape == (3, 5, WIDTH)


def test_a_deferred_layer_has_the_values_of_one_made_outright() -> None:
    torch.manual_seed(1)
    with deferred_init() as record:
        layer = MoE(WIDTH, HIDDEN, EXPERTS, 2)
    record.materialise(layer, keep=lambda name: True)
    outright = make_layer()
    assert all(torch.equal(one, other) for one, other in zip(layer.parameters(), outright.parameters(), strict=True))


def test_more_experts_for_a_token_than_there_are_are_refused() -> None:
    with pytest.raises(SetupError, match="num_experts=4, top_k=5"):
        make_layer(5)
