"""Norm of all gradients, including those of sharded tables, and clipping by it.

The gradient of a table never exists as a tensor. It follows from the gradients of a kernel's outputs, summed for each
row that was looked up. The transpose of a lookup is itself a lookup: a row's gradient is a bag of output gradients, one
for each position of its id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import PoolingMode
from torch import nn

from lightning_pipe.recsys.kernels.kernel_calls import KernelCall, KernelOutputGradients


@torch.no_grad()
def get_total_table_grad_norm(
    gradients: KernelOutputGradients,
    replicated: Sequence[torch.Tensor],
    group: dist.ProcessGroup,
    device: torch.device,
) -> torch.Tensor:
    """2-norm of the gradients of all tables on all ranks, as if no table were sharded. A collective."""
    square = torch.zeros((), dtype=torch.float64, device=device)
    by_kernel: dict[int, list[tuple[KernelCall, torch.Tensor]]] = {}
    for call, gradient in zip(gradients.calls, gradients.gradients, strict=True):
        by_kernel.setdefault(id(call.kernel), []).append((call, gradient))
    for calls in by_kernel.values():
        for _, rows in row_gradients(calls):
            square += _compute_squared_norm(rows)
    if group.size() > 1:
        dist.all_reduce(square, group=group)
    for gradient in replicated:
        square += _compute_squared_norm(gradient)
    return square.sqrt()


def clip_dense_grads_by_global_norm(
    parameters: Iterable[nn.Parameter], tables: torch.Tensor, max_norm: float
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` over dense parameters and tables together."""
    parameters = list(parameters)
    dense = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    total = torch.linalg.vector_norm(torch.stack([dense.to(tables), tables])).float()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)  # same formula as PyTorch's


@torch.no_grad()
def row_gradients(calls: Sequence[tuple[KernelCall, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of the rows that one kernel looked up."""
    kernel = calls[0][0].kernel
    tables = kernel.feature_table_map
    widths = [kernel.embedding_specs[table][1] for table in tables]
    gradients_by_width = []
    for width in sorted(set(widths)):
        features = [feature for feature, feature_width in enumerate(widths) if feature_width == width]
        parts = [_map_rows_to_bag_gradients(call, gradient, features, widths) for call, gradient in calls]
        rows = torch.cat([part[0] for part in parts])
        if rows.numel():
            gradients_by_width.append(_sum_gradients_by_row(rows, parts))
    return gradients_by_width


# Rows of tables, the bag that each contributed to, its weight in the bag, and the gradients of the bags.
_Places = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _map_rows_to_bag_gradients(
    call: KernelCall, gradient: torch.Tensor, features: list[int], widths: list[int]
) -> _Places:
    """Positions of the ids of some features, whose tables have the same width."""
    kernel, count, width = call.kernel, call.indices.numel(), widths[features[0]]
    batch = (call.offsets.numel() - 1) // len(widths)
    lengths = call.offsets.diff()
    bags = torch.repeat_interleave(lengths, output_size=count)
    rows = call.indices.long() + kernel.hash_size_cumsum[bags // max(batch, 1)]
    weights = torch.ones(count, device=rows.device) if call.weights is None else call.weights.detach().float()
    if kernel.pooling_mode == PoolingMode.NONE:
        # Each id has an output; all tables of such a kernel have one width.
        return rows, torch.arange(count, device=rows.device), weights, gradient.reshape(count, width).float()
    if kernel.pooling_mode == PoolingMode.MEAN:
        weights = weights / lengths[bags]
    ends = list(accumulate(widths, initial=0))
    columns = [gradient[:, ends[feature] : ends[feature] + width] for feature in features]
    gradients = torch.stack(columns).reshape(len(features) * batch, width).float()
    if len(features) == len(widths):
        return rows, bags, weights, gradients
    place = torch.full((len(widths),), -1, device=rows.device)
    place[features] = torch.arange(len(features), device=rows.device)
    place_of_id = place[bags // max(batch, 1)]
    selected = place_of_id >= 0
    return rows[selected], (place_of_id * batch + bags % max(batch, 1))[selected], weights[selected], gradients


def _sum_gradients_by_row(rows: torch.Tensor, parts: Sequence[_Places]) -> tuple[torch.Tensor, torch.Tensor]:
    starts = accumulate((len(part[3]) for part in parts[:-1]), initial=0)
    bags = torch.cat([part[1] + start for part, start in zip(parts, starts, strict=True)])
    # A stable order, so that sums do not depend on the sort algorithm.
    rows, order = rows.sort(stable=True)
    rows, counts = torch.unique_consecutive(rows, return_counts=True)
    sums = nn.functional.embedding_bag(
        bags[order],
        torch.cat([part[3] for part in parts]),
        counts.cumsum(0) - counts,
        mode="sum",
        per_sample_weights=torch.cat([part[2] for part in parts])[order],
    )
    return rows, sums


def _compute_squared_norm(gradient: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
