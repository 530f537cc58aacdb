"""Tied parameters, such as tied embeddings, of which stages on several ranks hold copies.

A copy has the first of the parameter's names, as in the whole model's ``named_parameters``, on every rank. All copies
start equal and get the sum of all copies' gradients, so that equal optimizers keep them equal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipe.engine.ranks.process_groups import new_group


@dataclass(frozen=True)
class TiedParameter:
    """One parameter under several names.

    Attributes:
        names: FQNs in the whole model. Copies have the first name.
        stages: indices of the stages that hold it, in order.
    """

    names: tuple[str, ...]
    stages: tuple[int, ...]


def find_parameters_tied_across_stages(
    groups: Sequence[Sequence[str]], fqns_of_stages: Sequence[Collection[str]]
) -> list[TiedParameter]:
    """Those of the groups of names that more than one stage holds."""
    tied = []
    for names in groups:
        stages = tuple(
            index
            for index, modules in enumerate(fqns_of_stages)
            if any(name.startswith(f"{module}.") for module in modules for name in names)
        )
        if len(stages) > 1:
            tied.append(TiedParameter(tuple(names), stages))
    return tied


def rename_tied_copies(part: nn.Module, tied: Sequence[TiedParameter]) -> None:
    """Give copies of parameters their first name, where a part of a model holds them under another."""
    for tied_parameter in tied:
        present = dict(part.named_parameters(remove_duplicate=False))
        copy = next((present[name] for name in tied_parameter.names if name in present), None)
        if copy is None or tied_parameter.names[0] in present:
            continue
        *path, leaf = tied_parameter.names[0].split(".")
        holder = part
        for name in path:
            if not hasattr(holder, name):
                holder.add_module(name, nn.Module())
            holder = holder.get_submodule(name)
        vars(holder).pop(leaf, None)
        holder.register_parameter(leaf, copy)


class TiedGradients:
    """Sums the gradients of copies, after those of micro-batches and of data-parallel ranks have been summed."""

    def __init__(
        self,
        tied: Sequence[TiedParameter],
        parameters: Mapping[str, nn.Parameter],
        ranks: Sequence[Sequence[int]],
        pipelines: Sequence[Sequence[int]],
    ) -> None:
        self._copies: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        for tied_parameter, holders in zip(tied, ranks, strict=True):
            for pipeline in pipelines:
                members = [pipeline[holder] for holder in holders]
                group = new_group(members)
                if isinstance(group, dist.ProcessGroup):
                    self._copies.append((parameters[tied_parameter.names[0]], group))

    @torch.no_grad()
    def sum(self) -> None:
        """Every rank that holds a copy calls this, once before a step. A copy without a gradient counts as zeros."""
        for copy, group in self._copies:
            if not copy.requires_grad:
                continue
            if copy.grad is None:
                copy.grad = torch.zeros_like(copy)
            dist.all_reduce(_local(copy.grad), group=group)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
