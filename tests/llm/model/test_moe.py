"""A mixture of experts sends every token to its most probable experts, and adds up what they make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.model.meta_tensors import fake_copy
from lightning_pipe.llm.model.moe import MoE
from lightning_pipe.llm.model.shapes import StageShapes
from tests.rounding import Reference

WIDTH, HIDDEN, EXPERTS = 6, 10, 4
# Rows of whole units of 16 bytes, in float32 and half precision: experts are computed in one call.
GROUPED = (8, 16)


def make_layer(top_k: int = 2, sizes: tuple[int, int] = (WIDTH, HIDDEN), **options: Any) -> MoE:
    torch.manual_seed(1)
    return MoE(*sizes, EXPERTS, top_k, **options)


def inputs(width: int = WIDTH) -> Tensor:
    return torch.randn(3, 5, width, generator=torch.Generator().manual_seed(2))


@contextmanager
def grouped_calls() -> Iterator[list[Tensor]]:
    """Results of ``grouped_mm``."""
    found: list[Tensor] = []
    whole = F.grouped_mm

    def noted(*args: Any, **keywords: Any) -> Tensor:
        found.append(whole(*args, **keywords))
        return found[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "grouped_mm", noted)
        yield found


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


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        pytest.param((WIDTH, HIDDEN), torch.float32, id="one by one"),
        pytest.param(GROUPED, torch.float32, id="in one call"),
        pytest.param(GROUPED, torch.float64, id="in float64"),
    ],
)
@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
def test_a_token_becomes_the_sum_of_its_experts_results(top_k: int, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    def results(function: Callable[[MoE, Tensor], Tensor]) -> dict[str, Any]:
        layer, x = make_layer(top_k, sizes).to(dtype), inputs(sizes[0]).to(dtype).requires_grad_()
        output = function(layer, x)
        output.square().sum().backward()
        return {"output": output, "input": x.grad} | {name: one.grad for name, one in layer.named_parameters()}

    expected = Reference.of(lambda: results(each_token_alone))
    with grouped_calls() as calls:
        assert expected.differences(results(lambda layer, x: layer(x))) == []
    assert len(calls) == (3 if sizes == GROUPED and dtype == torch.float32 else 0)


def test_a_layer_that_would_use_no_expert_is_refused() -> None:
    with pytest.raises(SetupError, match="top_k of the MoE is 0; expected a whole number, 1 or more"):
        make_layer(0)


@pytest.mark.parametrize("sizes", [(WIDTH, HIDDEN), GROUPED], ids=["one by one", "in one call"])
def test_experts_without_tokens_have_gradients_of_zero(sizes: tuple[int, int]) -> None:
    layer = make_layer(1, sizes)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[2, 0] = 1.0
    x = inputs(sizes[0])
    x[..., 0] = x[..., 0].abs() + 1.0
    layer(x).square().sum().backward()
    for weight in layer.experts.parameters():
        assert weight.grad is not None
        assert [bool(one.any()) for one in weight.grad] == [False, False, True, False]
    layer.zero_grad()
    layer(x[:0]).sum().backward()
    assert all(weight.grad is not None and not weight.grad.any() for weight in layer.parameters())


def test_gradients_may_be_one_value_expanded() -> None:
    layer = make_layer(sizes=GROUPED)
    rows, counts = torch.randn(5, GROUPED[0], generator=torch.Generator().manual_seed(3)), torch.tensor([2, 0, 3, 0])

    def gradients(results: Callable[[], Tensor]) -> dict[str, Any]:
        layer.zero_grad()
        results().sum().backward()
        return {name: one.grad for name, one in layer.experts.named_parameters()}

    def one_by_one() -> Tensor:
        parts = zip(rows.split(counts.tolist()), layer.experts.gate, layer.experts.up, layer.experts.down, strict=True)
        return torch.cat([F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down) for x, gate, up, down in parts])

    expected = Reference.of(lambda: gradients(one_by_one))
    assert expected.differences(gradients(lambda: layer.experts(rows, counts))) == []


def test_each_expert_is_initialized_as_a_linear_layer_is() -> None:
    weights = make_layer().experts
    for weight, fan_in in ((weights.gate, WIDTH), (weights.up, WIDTH), (weights.down, HIDDEN)):
        assert weight.abs().max() <= fan_in**-0.5
        assert float(weight.detach().std()) == pytest.approx((3 * fan_in) ** -0.5, rel=0.15)


@pytest.mark.parametrize("sizes", [(WIDTH, HIDDEN), GROUPED], ids=["one by one", "in one call"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_router_stays_exact_and_the_experts_do_not(
    dtype: torch.dtype, sizes: tuple[int, int]
) -> None:
    layer, x = make_layer(sizes=sizes), inputs(sizes[0])
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
    (shape,) = StageShapes([fake], mode).infer((inputs(),), {})
    assert shape.outputs[0].shape == (3, 5, WIDTH)
