"""Optimizers that cannot train a rank's part of a model are refused, and Muon trains sharded matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from lightning_pipe.engine import SetupError
from lightning_pipe.llm.parallel.parallel_dims import ParallelDims
from lightning_pipe.llm.run.optimizer_checks import check_not_fused, check_optimizers_for_sharding
from tests.distributed import run_ranks


@pytest.mark.parametrize("fused", [False, True])
def test_a_fused_optimizer_is_refused(fused: bool) -> None:
    options: dict[str, Any] = {"fused": fused}
    made = [SGD([nn.Parameter(torch.ones(1))], lr=0.1), AdamW([nn.Parameter(torch.ones(1))], **options)]
    if fused:
        with pytest.raises(SetupError, match="AdamW is fused"):
            check_not_fused(made)
    else:
        check_not_fused(made)


def test_adafactor_is_refused_for_sharded_parameters() -> None:
    made = [Adafactor([nn.Parameter(torch.ones(2, 2))])]
    for sizes in (ParallelDims(dp_shard=2), ParallelDims(tp=2)):
        with pytest.raises(SetupError, match=r"Adafactor needs whole rows and columns .*=2; expected 1\. Use AdamW"):
            check_optimizers_for_sharding(made, sizes)
        check_optimizers_for_sharding(
            [AdamW([nn.Parameter(torch.ones(2, 2))]), Muon([nn.Parameter(torch.ones(2, 2))])], sizes
        )
    check_optimizers_for_sharding(made, ParallelDims(dp_replicate=2))


SHAPES = ((8, 6), (6, 8), (7, 5))


def after(optimizer: Any, shape: tuple[int, int], dtype: torch.dtype, shard: Any = lambda one: one) -> torch.Tensor:
    """A matrix after three steps."""
    generator = torch.Generator().manual_seed(0)
    weight, *gradients = (torch.randn(shape, dtype=dtype, generator=generator) for _ in range(4))
    parameter = nn.Parameter(shard(weight))
    made: Optimizer = optimizer([parameter], lr=0.1)
    for gradient in gradients:
        parameter.grad = shard(gradient)
        made.step()
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def sharded(rank: int, world: int) -> list[tuple[float, float, float]]:
    """Differences from one device: exact, in bfloat16, and the rounding of bfloat16 on one device."""
    mesh = init_device_mesh("cpu", (world,))
    found = []
    for shape in SHAPES:
        places: tuple[Placement, ...] = (Shard(0), Shard(1))
        for place in places:

            def shard(one: torch.Tensor, place: Placement = place) -> torch.Tensor:
                return distribute_tensor(one, mesh, [place])

            rounded, whole = after(Muon, shape, torch.float64, shard), after(Muon, shape, torch.float64)
            with pytest.MonkeyPatch.context() as patch:
                # Muon computes its products of matrices in bfloat16.
                patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
                exact, expected = after(Muon, shape, torch.float64, shard), after(Muon, shape, torch.float64)
            far = [float((one - expected).abs().max()) for one in (exact, rounded, whole)]
            found.append((far[0], far[1], far[2]))
    return found


def test_muon_orthogonalises_the_whole_of_a_sharded_matrix() -> None:
    for exact, rounded, rounded_alone in run_ranks(sharded, 2)[0]:
        assert exact < 1e-12
        assert rounded < 4 * rounded_alone
        assert rounded_alone > 1e-4  # Newton-Schulz in bfloat16
