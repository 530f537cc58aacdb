"""Gradients of tables over a window of micro-batches, which the optimizers of the tables step with once.

A fused optimizer steps in each backward of its lookup. So the inputs of the lookups and the gradients of their outputs
are kept, and joined into one call at the end of the window. Its lookup is repeated, and its backward steps the
optimizer as for one large batch: FBGEMM adds up all gradients of a row before it updates the row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import PoolingMode
from torch import Tensor, nn

from lightning_pipe.recsys.kernels.kernel_calls import KernelCall, KernelOutputGradients, SyntheticKernelCall
from lightning_pipe.recsys.modules.managed_collision import set_eviction_hook
from lightning_pipe.recsys.rewrite.batch_state import Embeddings, release_pinned_rows

if TYPE_CHECKING:
    from lightning_pipe.recsys.dynamic.tables.row_tables import BatchRows

_Pair = tuple[KernelCall, Tensor]


class TableGradientAccumulator:
    """Gradients of the micro-batches of a window."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.is_last = False  # True if the current batch ends the window; the caller sets it before each forward pass
        self._pairs: list[_Pair] = []
        self._replicated: dict[nn.Parameter, Tensor] = {}
        self._rows: list[BatchRows] = []
        self._overflowed = False
        self._modules = list(modules.values())
        for module in self._modules:
            set_eviction_hook(module, self._drop_evicted_gradients)

    def __bool__(self) -> bool:
        return bool(self._pairs or self._replicated)

    def add(self, embeddings: Embeddings) -> None:
        """Keep the gradients of a micro-batch after the first half of its backward, and the rows that it looked up."""
        kernel_gradients = embeddings.kernel_gradients
        assert kernel_gradients is not None
        self._accumulate_kernel_gradients(kernel_gradients)
        self._rows += embeddings.take_held_rows()
        embeddings.kernel_gradients = None

    def complete(self, embeddings: Embeddings) -> None:
        """Add the gradients of the window to those of its last micro-batch, if it has any, and begin a new window."""
        if self:
            if embeddings.kernel_gradients is not None:
                self._accumulate_kernel_gradients(embeddings.kernel_gradients)
            by_kernel: dict[int, list[_Pair]] = {}
            for pair in self._pairs:
                by_kernel.setdefault(id(pair[0].kernel), []).append(pair)
            joined = [_join_kernel_calls(pairs) for pairs in by_kernel.values()]
            for weights, gradient in self._replicated.items():
                weights.grad = gradient
            embeddings.kernel_gradients = KernelOutputGradients(
                [call for call, _ in joined], [gradient for _, gradient in joined], list(self._replicated)
            )
        embeddings.hold_rows(self._rows)
        self._pairs, self._replicated, self._rows = [], {}, []

    def note_overflow(self) -> None:
        """Record that a micro-batch of the window has an infinite or NaN gradient."""
        self._overflowed = True

    def take_overflow(self) -> bool:
        """Return True if :meth:`note_overflow` was called since the last call of this method."""
        overflowed, self._overflowed = self._overflowed, False
        return overflowed

    def drop(self) -> None:
        """Drop the gradients of an unfinished window, as the dense gradients are cleared."""
        rows = self._rows
        self._pairs, self._replicated, self._rows, self._overflowed = [], {}, [], False
        release_pinned_rows(rows, trained=False)

    def close(self) -> None:
        """Drop all gradients, and leave the modules as they were."""
        self.drop()
        for module in self._modules:
            set_eviction_hook(module, None)

    def _accumulate_kernel_gradients(self, kernel_gradients: KernelOutputGradients) -> None:
        for call, gradient in zip(kernel_gradients.calls, kernel_gradients.gradients, strict=True):
            self._pairs.append(
                (
                    SyntheticKernelCall.from_call_with_new_inputs(call, call.indices, call.offsets, call.weights),
                    gradient,
                )
            )
        for weights in kernel_gradients.replicated:
            assert weights.grad is not None
            accumulated = self._replicated.get(weights)
            self._replicated[weights] = weights.grad if accumulated is None else accumulated + weights.grad
            weights.grad = None

    @torch.no_grad()
    def _drop_evicted_gradients(self, kernel: Any, table: int, rows: Tensor) -> None:
        """Drop the gradients of rows that a map has just given to other ids.

        Tables with a map are sharded by rows, so their kernels add up bags, and an id can be left out of its bag.
        """
        for place, (call, gradient) in enumerate(self._pairs):
            if call.kernel is kernel:
                self._pairs[place] = _drop_rows_from_kernel_call(call, gradient, table, rows)


def _count_bags_per_feature(call: KernelCall) -> int:
    """Number of bags of each feature."""
    return (call.offsets.numel() - 1) // len(call.kernel.feature_table_map)


def _drop_rows_from_kernel_call(call: KernelCall, gradient: Tensor, table: int, rows: Tensor) -> _Pair:
    lengths = call.offsets.diff()
    bag = torch.repeat_interleave(lengths, output_size=call.indices.numel())
    tables = torch.tensor(call.kernel.feature_table_map, device=bag.device)
    is_kept = (tables[bag // max(_count_bags_per_feature(call), 1)] != table) | ~torch.isin(
        call.indices, rows.to(call.indices)
    )
    if call.kernel.pooling_mode == PoolingMode.NONE:
        gradient = gradient[is_kept]
    lengths = torch.zeros_like(lengths).index_add_(0, bag, is_kept.to(lengths.dtype))
    offsets = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(call.offsets.dtype)
    weights = None if call.weights is None else call.weights[is_kept]
    return SyntheticKernelCall.from_call_with_new_inputs(call, call.indices[is_kept], offsets, weights), gradient


@torch.no_grad()
def _join_kernel_calls(pairs: Sequence[_Pair]) -> _Pair:
    """Join calls of one kernel into a call with all their bags, in the order feature, micro-batch, sample."""
    if len(pairs) == 1:
        return pairs[0]
    calls = [call for call, _ in pairs]
    features, sizes = len(calls[0].kernel.feature_table_map), [_count_bags_per_feature(call) for call in calls]
    lengths = torch.cat([call.offsets.diff() for call in calls])
    # Bags are in the order micro-batch, feature, sample. The number of each bag, by feature and micro-batch:
    numbers = torch.arange(lengths.numel()).split([features * size for size in sizes])
    order = torch.cat([part.view(features, size) for part, size in zip(numbers, sizes, strict=True)], dim=1).flatten()
    places = torch.arange(sum(call.indices.numel() for call in calls), device=lengths.device)
    lengths, ids, _ = torch.ops.fbgemm.permute_1D_sparse_data(
        order.to(lengths.device, torch.int32), lengths, places, None, places.numel()
    )
    gradient = torch.cat([gradient for _, gradient in pairs])
    if calls[0].kernel.pooling_mode == PoolingMode.NONE:  # a gradient for each id
        gradient = gradient[ids]
    weights = None
    if any(call.weights is not None for call in calls):
        call_weights = [
            torch.ones_like(call.indices, dtype=torch.float) if call.weights is None else call.weights for call in calls
        ]
        weights = torch.cat(call_weights)[ids]
    offsets = nn.functional.pad(lengths.cumsum(0), (1, 0)).to(calls[0].offsets.dtype)
    return SyntheticKernelCall.from_call_with_new_inputs(
        calls[-1], torch.cat([call.indices for call in calls])[ids], offsets, weights
    ), gradient
