"""Experts on several ranks learn from the tokens of all of them what one device with all experts would learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.moe import MoE
from lightning_pipe.llm.parallel.expert_parallel import apply_expert_parallel, check_experts
from tests.distributed import run_ranks
from tests.rounding import Reference

WIDTH, HIDDEN, EXPERTS = 8, 12, 4


def full(value: Any) -> Tensor:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


FLOWS: dict[str, Callable[[int], Tensor]] = {
    # The layer's router looks at the first numbers.
    "none for the experts of some ranks": lambda rank: torch.eye(WIDTH)[[rank % 2, 0, 1]],
    "a rank without tokens": lambda rank: torch.eye(WIDTH)[[rank, 3] * (rank % 3)],
    "no tokens at all": lambda rank: torch.zeros(0, WIDTH),
}


def make_layer() -> MoE:
    torch.manual_seed(5)
    layer = MoE(WIDTH, HIDDEN, EXPERTS, 1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, :EXPERTS] = torch.eye(EXPERTS)
    return layer


def run_layer(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor | None]]:
    x = x.clone().requires_grad_()
    output = layer(x)
    (output.square().sum() + output.sum()).backward()
    assert x.grad is not None
    gradients = {name: None if one.grad is None else full(one.grad) for name, one in layer.named_parameters()}
    return output.detach(), x.grad, gradients


def on_four_ranks(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("expert",))
    for name, tokens in FLOWS.items():
        layer = make_layer()
        apply_expert_parallel(layer, mesh)
        found[name] = run_layer(layer, tokens(rank))
    uneven = init_device_mesh("cpu", (1, 4), mesh_dim_names=("expert", "shard"))
    try:
        apply_expert_parallel(MoE(6, 8, 4, 1), uneven["expert"], uneven["shard"])
    except SetupError as error:
        found["uneven"] = str(error)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_four_ranks, 4)


@pytest.mark.parametrize("name", FLOWS)
def test_a_layer_gives_each_rank_its_tokens_results_however_they_flow(name: str, ranks: list[dict[str, Any]]) -> None:
    inputs = [FLOWS[name](rank) for rank in range(4)]

    def on_one_rank() -> dict[str, Any]:
        output, gradient, gradients = run_layer(make_layer(), torch.cat(inputs))
        experts = {key: value for key, value in gradients.items() if key.startswith("experts.")}
        return {"output": output, "gradient": gradient, **experts}

    expected, found = Reference.of(on_one_rank), [one[name] for one in ranks]
    together = {"output": torch.cat([one[0] for one in found]), "gradient": torch.cat([one[1] for one in found])}
    for rank, (*_, gradients) in enumerate(found):
        assert [key for key, value in gradients.items() if value is None] == [], f"rank {rank}"
        assert expected.differences(together | gradients) == [], f"rank {rank}"


def test_experts_whose_widths_cannot_be_sharded_are_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("widths 6 and 8 cannot be sharded over 4 ranks" in one["uneven"] for one in ranks)


def test_a_number_of_experts_that_the_ranks_do_not_divide_is_refused() -> None:
    model = nn.Sequential(make_layer())
    check_experts(model, 2)
    with pytest.raises(SetupError, match=r"0\.experts has 4 experts, which parallel.ep=3"):
        check_experts(model, 3)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(SetupError, match="Sequential has no experts"):
        check_experts(nn.Sequential(nn.Linear(2, 2)), 2)


def test_experts_of_another_layout_are_refused_by_name() -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(2, 4), nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    with pytest.raises(
        SetupError, match=r"the experts '0\.experts' are a ModuleList; expected a class whose parameters"
    ):
        check_experts(nn.Sequential(Listed()), 2)
