"""Captured calls of a sharded module's lookup kernels, which let its backward stop before the kernels.

kernels ──► cat ──► output dist ──► cut ──► user's dense part
   ▲         ▲
   │         └ lookup outputs: exist on every rank, even without a kernel
   └ kernel outputs: their backward runs the fused optimizer on the gradients
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.mc_embedding_modules import BaseShardedManagedCollisionEmbeddingCollection

from lightning_pipe._compat.torchrec import lookups_of
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.kernels.fused_kernels import hide_prefetch_queues_of_kernels, override_kernel_iteration

_MODULES = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection, BaseShardedManagedCollisionEmbeddingCollection)


@dataclass
class KernelCall:
    """One call of a fused kernel.

    Attributes:
        kernel: fused kernel, which looks up several features in its tables.
        indices: row numbers, one feature after the other.
        offsets: start of each bag in ``indices``, and the end: features x batch size + 1.
        weights: weight of each id in its bag; None for ones.
        output: batch size x sum of the features' columns; without pooling, ids x columns.
        arguments: all arguments of the call, including these.
        learning_rate: learning rate that its backward steps with, even if the kernel's rate changes later.
        count: number of the kernel's training lookups, including this one, if its optimizer counts.
        is_recounted: True if the count was corrected after the call.
    """

    kernel: SplitTableBatchedEmbeddingBagsCodegen
    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    output: torch.Tensor
    arguments: Mapping[str, Any]
    learning_rate: float
    count: int
    is_recounted: bool = False

    @property
    def is_current(self) -> bool:
        """True if neither the kernel's learning rate nor the number of the batch has changed since the call."""
        return not self.is_recounted and self.learning_rate == self.kernel.learning_rate_tensor.item()

    def recount(self) -> None:
        """Correct the count at the batch's turn: a batch before it, which was looked up, may not have been trained."""
        count = int(self.kernel.iter_cpu.item())
        self.count, self.is_recounted = count, self.is_recounted or count != self.count

    def output_at_current_rate(self) -> torch.Tensor:
        """Return the output to run backward from: of a repeated call if the learning rate has changed since."""
        if self.is_current:
            return self.output
        with (
            hide_prefetch_queues_of_kernels([self.kernel]),
            override_kernel_iteration(self.kernel, self.count),
            torch.enable_grad(),
        ):
            output: torch.Tensor = self.kernel(**self.arguments)
            return output


class SyntheticKernelCall(KernelCall):
    """A call that was not made: the lookups of several calls, or a part of one."""

    @classmethod
    def from_call_with_new_inputs(
        cls, call: KernelCall, indices: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None
    ) -> KernelCall:
        """Return *call* with other indices, offsets and weights."""
        arguments = {**call.arguments, "indices": indices, "offsets": offsets, "per_sample_weights": weights}
        output = call.output.new_empty(0)  # not used; the call's own output holds a graph
        return cls(call.kernel, indices, offsets, weights, output, arguments, call.learning_rate, call.count)

    @property
    def is_current(self) -> bool:
        return False


@dataclass
class LookupCalls:
    """One call of a sharded module.

    Attributes:
        outputs: outputs of its lookups, one per kind of sharding, which the output dists send.
        kernel_calls: calls of fused kernels; possibly empty on a rank.
        replicated: weights of the dense kernels called, which look up replicated tables.
    """

    outputs: list[torch.Tensor] = field(default_factory=list)
    kernel_calls: list[KernelCall] = field(default_factory=list)
    replicated: list[nn.Parameter] = field(default_factory=list)


@dataclass
class KernelOutputGradients:
    """Gradients of the kernels' outputs.

    Attributes:
        calls: calls of fused kernels.
        gradients: gradient of each call's output, with the same shape.
        replicated: weights of dense kernels, with the gradients of this rank's batch in ``.grad``.
    """

    calls: list[KernelCall]
    gradients: list[torch.Tensor]
    replicated: list[nn.Parameter]


def trains_only_tables(module: nn.Module) -> bool:
    """Return True if a sharded module has only tables, and no dense weights such as feature processors'."""
    return isinstance(module, _MODULES)


def check_trainable_after_dense_step(modules: Mapping[str, nn.Module]) -> None:
    """Check that sharded modules, by name, can be trained after the dense optimizer's step."""
    for name, module in modules.items():
        if not trains_only_tables(module):
            raise SetupError(
                f"sharded module {name!r} is a {type(module).__name__}, which trains dense weights together with its"
                " tables. The dense weights must be trained before the dense optimizer's step and the tables after it,"
                " since the step clips gradients or skips those that overflowed. Use an EmbeddingBagCollection or"
                " EmbeddingCollection, or train without gradient clipping and in a precision other than 16-mixed."
            )


def check_calls_can_be_captured(modules: Mapping[str, nn.Module]) -> None:
    """Check that the kernels of sharded modules, by name, are of a type whose calls can be captured."""
    check_trainable_after_dense_step(modules)
    for name, module in modules.items():
        for kernel in _find_embedding_kernels(module):
            if not isinstance(kernel, (SplitTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen)):
                raise SetupError(
                    f"sharded module {name!r} looks up with a {type(kernel).__name__}, whose gradients are not known"
                    " before its optimizer has used them, as a norm over all gradients requires. Give its tables the"
                    " compute kernel 'fused', or train without gradient clipping."
                )


def maps_ids_at_lookup(module: nn.Module) -> bool:
    """Return True if a sharded module changes its map and evicts rows when it looks up.

    A lookup ahead of the previous batch's checkpoint would be part of the checkpoint.
    """
    return isinstance(module, BaseShardedManagedCollisionEmbeddingCollection)


def supports_late_rates(module: nn.Module) -> bool:
    """Return True if a sharded module's tables can step with a learning rate that is set after their lookup.

    That requires kernels whose calls can be captured and repeated.
    """
    kinds = (SplitTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen)
    return trains_only_tables(module) and all(isinstance(kernel, kinds) for kernel in _find_embedding_kernels(module))


def looks_up_replicated_tables(module: nn.Module) -> bool:
    """Return True if a sharded module looks up replicated tables, which no kernel trains."""
    return any(isinstance(kernel, DenseTableBatchedEmbeddingBagsCodegen) for kernel in _find_embedding_kernels(module))


def _find_embedding_kernels(module: nn.Module) -> Iterator[Any]:
    for lookup in lookups_of(module):
        for part in lookup.modules():
            if hasattr(part, "emb_module"):
                yield part.emb_module


@contextmanager
def capture_calls(module: nn.Module) -> Iterator[LookupCalls]:
    """Yield the calls that the module's lookups make in the context."""
    calls = LookupCalls()
    hooks = []
    for lookup in lookups_of(module):
        hooks.append(lookup.register_forward_hook(partial(_record_lookup_output, calls)))
        for kernel in lookup.modules():
            if isinstance(kernel, (SplitTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen)):
                hooks.append(kernel.register_forward_hook(partial(_record_kernel_call, calls), with_kwargs=True))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _record_lookup_output(
    calls: LookupCalls, lookup: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor
) -> None:
    calls.outputs.append(output)


def _record_kernel_call(
    calls: LookupCalls, kernel: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor
) -> None:
    if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen):
        weights = named.get("per_sample_weights")
        calls.kernel_calls.append(
            KernelCall(
                kernel,
                named["indices"],
                named["offsets"],
                weights,
                output,
                named,
                kernel.learning_rate_tensor.item(),
                int(kernel.iter_cpu.item()),
            )
        )
    else:
        assert isinstance(kernel.weights, nn.Parameter)
        calls.replicated.append(kernel.weights)
