"""Replicated (data-parallel) tables, trained in the same way as sharded tables.

TorchRec keeps a small table whole on every rank and looks it up with a dense kernel. No fused optimizer trains it, and
its lookup is inside a DistributedDataParallel that reduces in backward. Here the lookup is unwrapped. After the tables'
backward, the gradients are averaged over the ranks and a plain optimizer steps each table. The optimizers allowed for
it leave rows without a gradient unchanged, so the result equals that of a fused kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbeddingBag
from torchrec.optim.keyed import KeyedOptimizer

from lightning_pipe._compat.torch import version_counters_preserved
from lightning_pipe.recsys.kernels.table_optimizer import TableOptimizerSpec


def unwrap_lookups(lookups: list[nn.Module]) -> None:
    """Unwrap the lookups of a sharded module from DistributedDataParallel, in place.

    Its reducer would wait inside backward, and forever if one rank has no gradient.
    """
    for index, lookup in enumerate(lookups):
        if isinstance(lookup, DistributedDataParallel):
            lookups[index] = lookup.module


@dataclass(frozen=True)
class _ReplicatedTable:
    weights: torch.Tensor  # a view of the kernel's storage, rows x columns
    parameter: nn.Parameter  # the same, or a copy in float32 of weights in 16 bits, which steps as a fused kernel does
    optimizer: torch.optim.Optimizer

    def step(self, gradient: torch.Tensor) -> None:
        is_copy = self.parameter.dtype != self.weights.dtype
        if is_copy:
            self.parameter.copy_(self.weights)
        self.parameter.grad = gradient.view_as(self.parameter).to(self.parameter.dtype)
        self.optimizer.step()
        self.parameter.grad = None
        if is_copy:
            self.weights.copy_(self.parameter)


class _ReplicatedOptimizerProxy(KeyedOptimizer):
    """A table's optimizer with the interface of TorchRec's fused ones: named state, and a rate that ``step`` sets."""

    def __init__(
        self, name: str, short_name: str, shown: nn.Parameter, table: _ReplicatedTable, row_wise_state: bool
    ) -> None:
        self._inner = table.optimizer
        states = {}
        accumulated = table.optimizer.state[table.parameter].get("sum")
        if accumulated is not None:
            # A row-wise state is a column in TorchRec's unfused optimizer and a vector in FBGEMM's.
            states[f"{short_name}.momentum1"] = accumulated.view(-1) if row_wise_state else accumulated
        rate = table.optimizer.param_groups[0]["lr"]
        super().__init__({name: shown}, {shown: states}, [{"params": [shown], "lr": rate}])

    def step(self, closure: Any = None) -> None:
        """Copy the learning rate to the inner optimizer, which steps the table after the tables' backward."""
        (group,) = self.param_groups
        self._inner.param_groups[0]["lr"] = group["lr"]

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do nothing: the step that trains the table clears its gradient."""


class DataParallelTables:
    """All replicated tables of a model, which step together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._kernels: list[BatchedDenseEmbeddingBag] = []
        self._tables: list[list[_ReplicatedTable]] = []
        self._averaged: list[torch.Tensor] = []
        self.keyed_optimizers: list[KeyedOptimizer] = []  # one per table, to combine with TorchRec's fused ones

    def add(
        self,
        lookup: nn.Module,
        names: Mapping[str, str],
        table_optimizers: Mapping[str, TableOptimizerSpec],
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        """Add the dense kernels of one lookup. A lookup of sharded tables has none."""
        for kernel in lookup.modules():
            if not isinstance(kernel, BatchedDenseEmbeddingBag):
                continue
            tables = []
            for config, view in zip(kernel.config.embedding_tables, kernel.split_embedding_weights(), strict=True):
                name = names[config.name]
                table_optimizer = table_optimizers[name]
                assert table_optimizer.unfused_class is not None
                weights = view.detach()
                parameter = nn.Parameter(weights.float())
                optimizer = table_optimizer.unfused_class([parameter], **table_optimizer.hyper_parameters)
                table = _ReplicatedTable(weights, parameter, optimizer)
                tables.append(table)
                self.keyed_optimizers.append(
                    _ReplicatedOptimizerProxy(
                        name, config.name, parameters[name], table, table_optimizer.row_wise_state
                    )
                )
            self._kernels.append(kernel)
            self._tables.append(tables)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers of the tables, one each."""
        return [table.optimizer for tables in self._tables for table in tables]

    def zero_grad(self) -> None:
        """Clear the gradients that the tables' backward left."""
        for kernel in self._kernels:
            kernel.emb_module.weights.grad = None
        self._averaged = []

    @torch.no_grad()
    def average_gradients(self) -> list[torch.Tensor]:
        """Average the gradients over the ranks, unless this step's gradients are averaged already.

        Every rank of the group calls it, from one thread, after the backward of the lookups. A rank whose lookups got
        no gradient sends zeros.
        """
        weights = [kernel.emb_module.weights for kernel in self._kernels]
        if len(self._averaged) == len(weights) and all(map(_is_gradient_of, self._averaged, weights)):
            return self._averaged
        gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        works = [dist.all_reduce(gradient, group=self._group, async_op=True) for gradient in gradients]
        for weight, gradient, work in zip(weights, gradients, works, strict=True):
            if work is not None:
                work.wait()
            weight.grad = gradient.div_(self._group.size())
        self._averaged = gradients
        return gradients

    @torch.no_grad()
    def step(self) -> None:
        """Average the gradients over the ranks, step every table and clear the gradients.

        Called under the same conditions as ``average_gradients``.
        """
        if not self._kernels:
            return
        weights = tuple(kernel.emb_module.weights for kernel in self._kernels)
        gradients = self.average_gradients()
        # Rows may be looked up already for the next batch. Its backward does not read them.
        with version_counters_preserved(weights):
            for tables, gradient in zip(self._tables, gradients, strict=True):
                sizes = [table.parameter.numel() for table in tables]
                for table, part in zip(tables, gradient.split(sizes), strict=True):
                    table.step(part)
        self.zero_grad()


def _is_gradient_of(gradient: torch.Tensor, weights: torch.Tensor) -> bool:
    return weights.grad is gradient
