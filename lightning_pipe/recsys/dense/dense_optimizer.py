"""The user's dense optimizer, which must not hold tables and whose schedule may drive the tables' learning rates."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.kernels.table_optimizer import class_name


class TableParameterRegistry:
    """Table parameters by identity, each with its name.

    A user's ``configure_optimizers`` may list the sharded parameters or those that the module held before sharding. The
    original ones are held by weak references, so that they are not kept alive.
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._sharded: dict[str, nn.Parameter] = {}

    def add_sharded(self, name: str, parameter: nn.Parameter) -> None:
        """Add a table parameter of the sharded module."""
        self._sharded[name] = parameter
        self.add_original(name, parameter)

    def add_original(self, name: str, parameter: nn.Parameter) -> None:
        """Add a table parameter that the module held before sharding, by weak reference."""
        self._names[id(parameter)] = (weakref.ref(parameter), name)

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """Name of the table, or None for a dense parameter."""
        reference, name = self._names.get(id(parameter), (None, ""))
        return name if reference is not None and reference() is parameter else None

    def __iter__(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._sharded.items())


def remove_table_parameters(optimizer: torch.optim.Optimizer, tables: TableParameterRegistry) -> list[str]:
    """Remove tables from an optimizer's parameter groups, because table optimizers step them inside backward."""
    dense_groups: list[list[nn.Parameter]] = []
    removed: dict[str, None] = {}
    for index, group in enumerate(optimizer.param_groups):
        names = [(parameter, tables.name_of(parameter)) for parameter in group["params"]]
        dense = [parameter for parameter, name in names if name is None]
        table_names = [name for _, name in names if name is not None]
        if table_names and not dense:
            raise SetupError(
                f"parameter group {index} of the optimizer {class_name(type(optimizer))} holds embedding tables only"
                f" ({', '.join(dict.fromkeys(table_names))}), which table optimizers step inside backward. Add dense"
                " parameters to the group, or remove the group from configure_optimizers and set the tables' optimizer"
                " with apply_optimizer_in_backward or sparse_optimizer"
            )
        dense_groups.append(dense)
        removed.update(dict.fromkeys(table_names))
    for group, dense in zip(optimizer.param_groups, dense_groups, strict=True):
        group["params"] = dense
    for parameter in [key for key in optimizer.state if tables.name_of(key) is not None]:
        del optimizer.state[parameter]
    return list(removed)


def base_learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """Learning rate to which an optimizer's schedule is relative: ``initial_lr`` of its first group.

    A one-cycle schedule starts far below its nominal rate, which it stores as ``max_lr``; ``max_lr`` is then used. The
    result is 0.0 if no scheduler was ever attached, because the group then has no ``initial_lr``.
    """
    group = optimizer.param_groups[0]
    return float(group.get("max_lr", group.get("initial_lr", 0.0)))


def learning_rate_factor(optimizer: torch.optim.Optimizer, base: float | None = None) -> float:
    """Current learning rate relative to the base rate: ``lr / base`` of the first group; 1.0 if the base is zero."""
    base = base_learning_rate(optimizer) if base is None else base
    return float(optimizer.param_groups[0]["lr"]) / base if base else 1.0
