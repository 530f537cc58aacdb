"""The router loss of Hugging Face's models, computed from sums over layers, is their own with its gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.losses.balance_loss import BalanceLoss

EXPERTS, TOP_K, LAYERS, TOKENS = 5, 2, 3, 8
LOSS = BalanceLoss(0.3, TOP_K, EXPERTS)
# Float32 sums over 24 rows of probabilities in another order.
WITHIN = 1e-6


def layers() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(TOKENS, EXPERTS, generator=generator).requires_grad_() for _ in range(LAYERS)]


def sums(logits: list[Tensor], counted: Tensor | None) -> Tensor:
    """As two stages compute them, of one layer and of the others."""
    return LOSS.add_router_logits_to_sums(
        LOSS.add_router_logits_to_sums(LOSS.create_zero_sums(torch.device("cpu")), logits[:1], counted),
        logits[1:],
        counted,
    )


@pytest.mark.parametrize("masked", [False, True])
def test_loss_and_gradients_are_transformers_own(masked: bool) -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]) if masked else None
    own, theirs = layers(), layers()
    loss = LOSS.compute_from_sums(sums(own, None if mask is None else mask.bool()))
    expected = LOSS.coefficient * load_balancing_loss_func(tuple(theirs), EXPERTS, TOP_K, mask)  # type: ignore[arg-type]
    assert isinstance(expected, Tensor)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=WITHIN)
    loss.backward()
    expected.backward()
    for one, other in zip(own, theirs, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, atol=WITHIN, rtol=0)
    assert float(own[0].grad.abs().max()) > 1000 * WITHIN  # type: ignore[union-attr]


def test_a_micro_batch_without_tokens_has_no_loss() -> None:
    assert float(LOSS.compute_from_sums(sums(layers(), torch.zeros(2, 4, dtype=torch.bool)))) == 0.0


def test_sums_have_a_gradient_also_where_no_router_is() -> None:
    zeros = LOSS.create_zero_sums(torch.device("cpu"))
    passed = LOSS.add_router_logits_to_sums(zeros, [], None)
    assert passed.requires_grad
    assert passed is not zeros  # a stage's output is not its input
    with torch.no_grad():
        assert not LOSS.create_zero_sums(torch.device("cpu")).requires_grad


def model_of(family: str, **given: Any) -> nn.Module:
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}
    small |= {"num_key_value_heads": 2, "intermediate_size": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **small | given))


def test_a_config_enables_it() -> None:
    on = {"output_router_logits": True, "router_aux_loss_coef": 0.3, "num_local_experts": EXPERTS}
    assert BalanceLoss.from_model(model_of("mixtral", **on)) == LOSS
    for off in ({"output_router_logits": False}, {"router_aux_loss_coef": 0.0}):
        assert BalanceLoss.from_model(model_of("mixtral", **on | off)) is None
    assert BalanceLoss.from_model(model_of("llama", output_router_logits=True)) is None


def test_a_loss_of_another_kind_is_refused() -> None:
    with pytest.raises(
        SetupError,
        match=r"router loss of DogeForCausalLM is not .*load_balancing_loss_func.*register_router_loss_hooks",
    ):
        BalanceLoss.from_model(model_of("doge", output_router_logits=True, router_aux_loss_coef=0.3))


def test_router_logits_are_moved_out_of_a_models_results() -> None:
    class Output(dict[str, Any]):
        router_logits = (torch.ones(1), torch.zeros(1))

    base = nn.Identity()
    output, other = Output(), SimpleNamespace()
    with BalanceLoss.capture_router_logits(base) as found:
        base(output)
        base(other)
    assert [float(one) for one in found] == [1.0, 0.0]
    assert output["router_logits"] is None
    assert not base._forward_hooks
