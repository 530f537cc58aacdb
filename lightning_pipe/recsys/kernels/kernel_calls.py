"""What the lookup kernels of a sharded module were called with: enough to stop its backward in front of them.

kernels ──► cat ──► output dist ──► cut ──► user's dense part
   ▲         ▲
   │         └ lookup outputs: there on every rank, also where it holds no kernel
   └ kernel outputs: what is behind them belongs to the fused optimiser

Tested in ``tests/recsys/kernels/test_gradient_norm.py``.
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

from lightning_pipe._compat.torchrec import lookups_of
from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.kernels.fused import counted_as, prefetches_of_kernels_set_aside

__all__ = [
    "KernelCall",
    "KernelGradients",
    "LookupCalls",
    "can_follow_rates",
    "capture_calls",
    "check_capturable",
    "check_tables_wait",
    "has_dense_kernels",
    "trains_only_tables",
]

_MODULES = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)


@dataclass
class KernelCall:
    """One call of a fused kernel.

    Attributes:
        kernel: looks up several features in the tables it holds.
        indices: rows of tables, all features' one after the other.
        offsets: where each bag's begin in ``indices``, with the end: features x batch size + 1.
        weights: of each id in its bag; None for ones.
        output: batch size x sum of the features' columns; where the kernel does not pool, ids x columns.
        arguments: all that it was called with, these among them.
        learning_rate: that its backward will step with, whatever the kernel's is by then.
        count: of the kernel's lookups for training, this one included, where its optimiser counts.
    """

    kernel: SplitTableBatchedEmbeddingBagsCodegen
    indices: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    output: torch.Tensor
    arguments: Mapping[str, Any]
    learning_rate: float
    count: int

    @property
    def has_present_rate(self) -> bool:
        """Whether the kernel's learning rate is still the one that it was called with."""
        return self.learning_rate == self.kernel.learning_rate_tensor.item()

    def with_present_rate(self) -> torch.Tensor:
        """The output to run backward from: of another such call where the learning rate has changed since this one."""
        if self.has_present_rate:
            return self.output
        with (
            prefetches_of_kernels_set_aside([self.kernel]),
            counted_as(self.kernel, self.count),
            torch.enable_grad(),
        ):
            output: torch.Tensor = self.kernel(**self.arguments)
            return output


@dataclass
class LookupCalls:
    """One call of a sharded module.

    Attributes:
        outputs: of its lookups, one for each kind of sharding: what the output dists send.
        kernels: calls of fused kernels, which a rank may have none of.
        replicated: the weights of the dense kernels called, which look up tables that every rank holds.
    """

    outputs: list[torch.Tensor] = field(default_factory=list)
    kernels: list[KernelCall] = field(default_factory=list)
    replicated: list[nn.Parameter] = field(default_factory=list)


@dataclass
class KernelGradients:
    """Gradients in front of the kernels.

    Attributes:
        calls: of fused kernels.
        gradients: of each call's output, shaped like it.
        replicated: the weights of dense kernels; each has its gradient, of this rank's batch alone, in ``.grad``.
    """

    calls: list[KernelCall]
    gradients: list[torch.Tensor]
    replicated: list[nn.Parameter]


def trains_only_tables(module: nn.Module) -> bool:
    """Whether a sharded module has no dense weights, such as feature processors', beside its tables."""
    return isinstance(module, _MODULES)


def check_tables_wait(modules: Mapping[str, nn.Module]) -> None:
    """Checks that sharded modules, by name, can be trained after the dense optimiser's step.

    Raises:
        SetupError: one trains dense weights together with its tables.
    """
    for name, module in modules.items():
        if not trains_only_tables(module):
            raise SetupError(
                f"sharded module {name!r} is a {type(module).__name__}, which trains dense weights together with its"
                " tables: these would have to be trained before the dense optimiser's step for the ones, and after it"
                " for the other, since the step clips gradients or skips those that overflowed. Use an"
                " EmbeddingBagCollection or EmbeddingCollection; or train without gradient clipping, in a precision"
                " other than 16-mixed"
            )


def check_capturable(modules: Mapping[str, nn.Module]) -> None:
    """Checks that the lookups of sharded modules, by name, are of kernels whose calls can be captured.

    Raises:
        SetupError: naming the module and what it is, or which kernel it has.
    """
    check_tables_wait(modules)
    for name, module in modules.items():
        for kernel in _kernels(module):
            if not isinstance(kernel, (SplitTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen)):
                raise SetupError(
                    f"sharded module {name!r} looks up with a {type(kernel).__name__}, whose gradients cannot be told"
                    " before its optimiser has used them, as a norm over all gradients needs. Give its tables the"
                    " compute kernel 'fused', or train without gradient clipping"
                )


def can_follow_rates(module: nn.Module) -> bool:
    """Whether a sharded module's tables can be stepped with a learning rate that is set after their lookup.

    It takes kernels whose calls can be captured, to be made once more.
    """
    kinds = (SplitTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen)
    return trains_only_tables(module) and all(isinstance(kernel, kinds) for kernel in _kernels(module))


def has_dense_kernels(module: nn.Module) -> bool:
    """Whether a sharded module looks up replicated tables, which no kernel trains."""
    return any(isinstance(kernel, DenseTableBatchedEmbeddingBagsCodegen) for kernel in _kernels(module))


def _kernels(module: nn.Module) -> Iterator[Any]:
    for lookup in lookups_of(module):
        for part in lookup.modules():
            if hasattr(part, "emb_module"):
                yield part.emb_module


@contextmanager
def capture_calls(module: nn.Module) -> Iterator[LookupCalls]:
    """Yields what the module's lookups are called with in the body."""
    calls = LookupCalls()
    hooks = []
    for lookup in lookups_of(module):
        hooks.append(lookup.register_forward_hook(partial(_looked_up, calls)))
        for kernel in lookup.modules():
            if isinstance(kernel, (SplitTableBatchedEmbeddingBagsCodegen, DenseTableBatchedEmbeddingBagsCodegen)):
                hooks.append(kernel.register_forward_hook(partial(_called, calls), with_kwargs=True))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _looked_up(calls: LookupCalls, lookup: nn.Module, arguments: tuple[Any, ...], output: torch.Tensor) -> None:
    calls.outputs.append(output)


def _called(
    calls: LookupCalls, kernel: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor
) -> None:
    if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen):
        weights = named.get("per_sample_weights")
        calls.kernels.append(
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
