"""Routers' losses get their gradients where the routers are, once, times the tokens of the micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_pipe.engine.common.errors import InputError
from lightning_pipe.llm.losses.router_losses import RouterLosses, attach_router_losses, sum_router_losses
from lightning_pipe.llm.model.moe import MoE
from tests.rounding import Reference

WIDTH, EXPERTS, TOKENS = 6, 4, 7
BALANCE, Z = 0.5, 0.2

Gradients = dict[str, Tensor]


def make_layer(balance: float = BALANCE, z: float = Z) -> MoE:
    torch.manual_seed(1)
    return MoE(WIDTH, 10, EXPERTS, 2, balance_coefficient=balance, z_coefficient=z)


def inputs() -> Tensor:
    return torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(2)).requires_grad_()


def main_loss(output: Tensor) -> Tensor:
    return output.square().sum()


def gradients(layer: nn.Module, x: Tensor) -> Gradients:
    found = {name: parameter.grad for name, parameter in layer.named_parameters()} | {"x": x.grad}
    return {name: gradient for name, gradient in found.items() if gradient is not None}


def train(
    forward: Callable[[MoE, Tensor], Tensor], layer: MoE | None = None, **options: Any
) -> tuple[Gradients, RouterLosses]:
    layer, x, losses = layer or make_layer(), inputs(), RouterLosses(TOKENS, **options)
    with losses:
        output = forward(layer, x)
    main_loss(output).backward()
    return gradients(layer, x), losses


def plain(layer: MoE, x: Tensor) -> Tensor:
    return layer(x)


def expected(scale: float = 1.0, balance: float = BALANCE, z: float = Z, counted: Tensor | None = None) -> Gradients:
    """Gradients of one loss in which everything is, by other formulas."""
    layer, x = make_layer(), inputs()
    logits = layer.router(x).flatten(0, 1)
    logits = logits if counted is None else logits[counted.flatten()]
    main_loss(layer(x)).mul(scale).backward(retain_graph=True)
    balance_loss = torch.zeros(())
    for expert in range(EXPERTS):
        chosen = (logits.topk(2).indices == expert).any(1)
        balance_loss = balance_loss + EXPERTS * chosen.float().mean() / 2 * logits.softmax(1)[:, expert].mean()
    z_loss = logits.exp().sum(1).log().square().mean()
    (scale * TOKENS * (balance * balance_loss + z * z_loss)).backward()
    return gradients(layer, x)


def assert_close(found: Gradients, wanted: Callable[[], Gradients]) -> None:
    reference = Reference.of(wanted)
    assert found.keys() == reference.values.keys()
    assert reference.differences(found) == []


@pytest.mark.parametrize(("balance", "z"), [(BALANCE, Z), (BALANCE, 0.0), (0.0, Z)])
def test_a_routers_losses_enter_times_coefficient_and_tokens(balance: float, z: float) -> None:
    found, _ = train(plain, make_layer(balance, z))
    assert_close(found, lambda: expected(balance=balance, z=z))
    without = expected(balance=0.0, z=0.0)
    assert not torch.allclose(found["router.weight"], without["router.weight"], rtol=1e-3)


def test_outside_a_context_they_have_no_effect() -> None:
    layer, x = make_layer(), inputs()
    main_loss(layer(x)).backward()
    assert_close(gradients(layer, x), lambda: expected(balance=0.0, z=0.0))


def test_a_scale_of_the_main_loss_scales_them_too() -> None:
    scaled, _ = train(lambda layer, x: layer(x) * 8.0**0.5, scale=8.0)
    assert_close(scaled, lambda: expected(scale=8.0))


def test_following_the_main_loss_finds_whatever_scale_it_gets_later() -> None:
    layer, x, losses = make_layer(), inputs(), RouterLosses(TOKENS)
    with losses:
        output = layer(x)
    loss = losses.scale_with_loss(main_loss(output))
    assert torch.equal(loss, main_loss(output))
    (loss / 3 * 1024.0).backward()
    assert_close(gradients(layer, x), lambda: expected(scale=1024.0 / 3))


def test_tokens_that_do_not_count_do_not_change_them() -> None:
    counted = torch.ones(3, 5, dtype=torch.bool)
    counted[1, 2:] = False
    counted[2] = False
    found, _ = train(plain, token_mask=counted)
    assert_close(found, lambda: expected(counted=counted))
    nothing, none = train(plain, token_mask=torch.zeros(3, 5, dtype=torch.bool))
    assert_close(nothing, lambda: expected(balance=0.0, z=0.0))
    assert sum_router_losses([none]).tolist() == [0.0, 0.0, TOKENS]
    with pytest.raises(InputError, match=r"\(2, 5\).*15 tokens"):
        train(plain, token_mask=counted[:2])


def keep_products(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "mm" in str(function) else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("counted", [None, torch.arange(15).view(3, 5) % 4 > 0], ids=["all tokens", "some tokens"])
@pytest.mark.parametrize(
    "options", [{}, {"context_fn": partial(create_selective_checkpoint_contexts, keep_products)}], ids=["all", "some"]
)
def test_activations_computed_anew_change_nothing_and_are_noted_once(
    options: dict[str, Any], counted: Tensor | None
) -> None:
    wanted, noted = train(plain, token_mask=counted)
    found, again = train(lambda layer, x: checkpoint(layer, x, use_reentrant=False, **options), token_mask=counted)
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())
    assert torch.equal(sum_router_losses([again]), sum_router_losses([noted]))


def test_a_backward_in_two_parts_gives_each_gradient_once() -> None:
    layer, x = make_layer(), inputs()
    with RouterLosses(TOKENS):
        output = layer(x).clone()
    _, groups = stage_backward_input([output], [2 * output.detach()], [x], layer.parameters())
    assert set(gradients(layer, x)) == {"x"}
    stage_backward_weight(layer.parameters(), groups)
    assert_close(gradients(layer, x), lambda: train(plain)[0])


def test_a_compiled_layer_gets_the_same() -> None:
    layer = make_layer()
    layer.compile(backend="aot_eager")
    found, noted = train(plain, layer)
    assert_close(found, lambda: train(plain)[0])
    assert_close({"sums": sum_router_losses([noted])}, lambda: {"sums": sum_router_losses([train(plain)[1]])})


def test_evaluation_notes_them() -> None:
    _, noted = train(plain)
    losses = RouterLosses(TOKENS)
    with torch.no_grad(), losses:
        make_layer()(inputs())
    assert torch.equal(sum_router_losses([losses]), sum_router_losses([noted]))


def test_their_sums_give_means_over_routers_and_tokens() -> None:
    balanced = torch.eye(4).repeat(3, 1)
    all_to_one = torch.tensor([[9.0, -9.0, -9.0, -9.0]]).repeat(5, 1)
    first, second = RouterLosses(12), RouterLosses(20)
    with first:
        attach_router_losses(balanced, 1)
        attach_router_losses(balanced, 1)
    with second:
        attach_router_losses(all_to_one, 1)
    balance, z, count = sum_router_losses([first, second, RouterLosses(100)]).tolist()
    assert count == 2 * 12 + 20
    assert balance == pytest.approx(24 * 1.0 + 20 * 4.0)
    assert z == pytest.approx(24 * float(torch.eye(4)[0].logsumexp(0) ** 2) + 20 * 81.0)


def test_half_precision_logits_have_losses_in_float32() -> None:
    logits = torch.randn(50, EXPERTS, dtype=torch.bfloat16, requires_grad=True)
    with RouterLosses(1) as losses:
        passed = attach_router_losses(logits, 2, balance_coefficient=1.0)
    passed.sum().backward()
    assert passed.dtype == torch.bfloat16
    with RouterLosses(1) as exact:
        attach_router_losses(logits.float(), 2)
    assert torch.equal(sum_router_losses([losses]), sum_router_losses([exact]))
