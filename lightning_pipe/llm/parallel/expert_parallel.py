"""Expert parallelism: each rank holds some experts of every layer, and tokens are sent to the ranks of their experts.

    tokens by expert ──► all-to-all ──► local experts ──► all-to-all ──► results by expert, in the tokens' order

The number of tokens sent to each rank differs between calls, so ranks exchange the splits first. While tokens travel,
another forward or backward of the rank can run (``overlap``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from lightning_pipe._compat.collectives import all_to_all_single, replicate, wait_tensor
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.llm.model.hf_experts import (
    experts_of,
    experts_take_all_tokens,
    run_batched_expert_parallel_forward,
    run_expert_parallel_forward,
)
from lightning_pipe.llm.model.moe import Experts, MoE
from lightning_pipe.llm.parallel.overlap import yield_to_overlapped_pass


def check_experts(model: nn.Module, size: int) -> None:
    """Check that the experts of a whole model, on any device, can be sharded over ``size`` ranks."""
    layers = experts_of(model)
    if not layers:
        raise SetupError(
            f"parallel.ep is {size}, but {type(model).__name__} has no experts; expected layers of the class"
            " lightning_pipe.llm.model.moe.MoE, or Hugging Face's blocks with a router and experts. Build the model"
            " from them, or leave parallel.ep at 1"
        )
    for name, experts in layers.items():
        numbers = {len(parameter) for parameter in experts.parameters()}
        is_supported = hasattr(experts, "has_gate") or type(experts) is Experts or experts_take_all_tokens(experts)
        if len(numbers) != 1 or not is_supported:
            raise SetupError(
                f"parallel.ep is {size}, but the experts {name!r} are a {type(experts).__name__}; expected a class"
                " whose parameters have one entry for each expert in dimension 0, and whose forward takes the tokens,"
                " and the numbers and weights of the experts of each token, as in transformers' models with an"
                " experts_implementation. Leave parallel.ep at 1"
            )
        number = numbers.pop()
        if number % size:
            raise SetupError(
                f"{name} has {number} experts, which parallel.ep={size} does not divide; expected the same number of"
                " experts on every rank. Set parallel.ep to a divisor, or change the number of experts"
            )


def apply_expert_parallel(
    stage: nn.Module, mesh: DeviceMesh, data_mesh: DeviceMesh | None = None, *, reshard_after_forward: bool = False
) -> None:
    """Keep only this rank's experts of each layer of a stage, in place. Call it before data parallelism of the stage.

    The experts' parameters become DTensors, sharded by expert over ``mesh``, and also over ``data_mesh`` if it has a
    ``shard`` dimension. Their gradients are sums over the tokens of all ranks that send any. The reduction over
    ``data_mesh`` becomes a sum, too, once ``force_sum_reduction`` is called on the stage, as ``apply_data_parallel``
    does at its end.
    """
    sharded = data_mesh is not None and "shard" in (data_mesh.mesh_dim_names or ())
    layers = experts_of(stage)
    if layers:
        check_experts(stage, mesh.size())
    for experts in layers.values():
        _shard_experts(experts, mesh)
        if data_mesh is not None and sharded:
            _check_expert_widths(experts, data_mesh["shard"].size())
            # Sharded by width: the first dimension is already sharded over `mesh`.
            fully_shard(
                experts,
                mesh=data_mesh,
                reshard_after_forward=reshard_after_forward,
                shard_placement_fn=lambda _: Shard(1),
            )
        elif data_mesh is not None:
            replicate(experts, mesh=data_mesh)
    exchange = _ExpertParallelRunner(mesh.get_group())
    for module in stage.modules():
        if isinstance(module, MoE):
            module.exchange = exchange
        elif module in layers.values() and not isinstance(module, Experts):
            run = (
                run_batched_expert_parallel_forward if experts_take_all_tokens(module) else run_expert_parallel_forward
            )
            module.forward = partial(run, module, exchange)


def expert_parallel_parameters(stage: nn.Module) -> set[nn.Parameter]:
    """Parameters sharded by :func:`apply_expert_parallel`, which data parallelism of the stage must ignore."""
    layers: list[nn.Module] = [
        module.experts for module in stage.modules() if isinstance(module, MoE) and module.exchange is not None
    ]
    layers += [experts for experts in experts_of(stage).values() if isinstance(vars(experts).get("forward"), partial)]
    return {parameter for experts in layers for parameter in experts.parameters()}


def _shard_experts(experts: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(experts.named_parameters()):
        local = parameter.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
        sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
        setattr(experts, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def _check_expert_widths(experts: nn.Module, size: int) -> None:
    widths = {parameter.shape[1] for parameter in experts.parameters()}
    if any(width % size for width in widths):
        raise SetupError(
            f"experts of the widths {' and '.join(map(str, sorted(widths)))} cannot be sharded over {size} ranks;"
            f" expected multiples of {size}. Change dim and hidden_dim, or raise parallel.ep, so that fewer ranks hold"
            " the same experts"
        )


class _ExpertParallelRunner:
    """Runs the experts of all ranks of a group; each rank calls it with its own tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, experts: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, counts: Tensor) -> Tensor:
        """As :class:`~lightning_pipe.llm.model.moe.Experts`, with the token counts of the experts of all ranks."""
        arriving_counts = _run_overlapped_all_to_all(counts, None, None, self._group)
        # Tokens arrive sorted by source rank, then by expert.
        counts_by_rank = arriving_counts.view(self._group.size(), -1)
        sent, received = torch.stack([counts.view_as(counts_by_rank).sum(1), counts_by_rank.sum(1)]).tolist()
        local_tokens = _all_to_all_autograd(tokens, sent, received, self._group)
        expert_ids = torch.arange(counts_by_rank.shape[1], device=counts.device).repeat(len(counts_by_rank))
        by_expert = expert_ids.repeat_interleave(arriving_counts, output_size=len(local_tokens)).argsort(stable=True)
        results = experts(local_tokens[by_expert], counts_by_rank.sum(0))
        return _all_to_all_autograd(results[by_expert.argsort()], received, sent, self._group)


class _TokenAllToAll(torch.autograd.Function):
    """All-to-all of rows; backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = received, sent, group
        return _run_overlapped_all_to_all(tokens, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _run_overlapped_all_to_all(gradient.contiguous(), *ctx.back), None, None, None


# Compiled code could not pass the turn.
@torch.compiler.disable
def _run_overlapped_all_to_all(
    rows: Tensor, sent: list[int] | None, received: list[int] | None, group: dist.ProcessGroup
) -> Tensor:
    pending = all_to_all_single(rows, received, sent, group)
    yield_to_overlapped_pass()
    arrived: Tensor = wait_tensor(pending)
    return arrived


@torch.compiler.disable
def _all_to_all_autograd(tokens: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived: Tensor = _TokenAllToAll.apply(tokens, sent, received, group)
    return arrived
