"""The user's own optimiser, the dense one: it must not hold tables, and its schedule may drive theirs."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.kernels.table_optimizer import class_name

__all__ = ["TableParameters", "base_learning_rate", "learning_rate_factor", "take_tables_out"]


class TableParameters:
    """The parameters that are tables, by identity, each with its name.

    Holds the sharded parameters, and weakly those that the module held before sharding: a user's
    ``configure_optimizers`` may list either, and the unsharded ones must not be kept alive for that.
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._sharded: dict[str, nn.Parameter] = {}

    def add_sharded(self, name: str, parameter: nn.Parameter) -> None:
        """Adds a table as the sharded module holds it."""
        self._sharded[name] = parameter
        self.add_original(name, parameter)

    def add_original(self, name: str, parameter: nn.Parameter) -> None:
        """Adds a table as the module held it before sharding; it is held weakly."""
        self._names[id(parameter)] = (weakref.ref(parameter), name)

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """The table's name, None for a dense parameter."""
        reference, name = self._names.get(id(parameter), (None, ""))
        return name if reference is not None and reference() is parameter else None

    def __iter__(self) -> Iterator[tuple[str, nn.Parameter]]:
        return iter(self._sharded.items())

    def __len__(self) -> int:
        return len(self._sharded)


def take_tables_out(optimizer: torch.optim.Optimizer, tables: TableParameters) -> list[str]:
    """Removes tables from an optimiser's parameter groups: their own optimisers step them, inside backward.

    Args:
        optimizer: what the user's ``configure_optimizers`` returned; changed in place.
        tables: the tables of the sharded model.

    Returns:
        Names of the tables removed, in the groups' order, each once.

    Raises:
        SetupError: a group that holds nothing but tables; the optimiser is then unchanged.
    """
    kept: list[list[nn.Parameter]] = []
    removed: dict[str, None] = {}
    for index, group in enumerate(optimizer.param_groups):
        names = [(parameter, tables.name_of(parameter)) for parameter in group["params"]]
        dense = [parameter for parameter, name in names if name is None]
        found = [name for _, name in names if name is not None]
        if found and not dense:
            raise SetupError(
                f"parameter group {index} of the optimiser {class_name(type(optimizer))} holds embedding tables only"
                f" ({', '.join(dict.fromkeys(found))}), which their own optimisers step inside backward; list the"
                " dense parameters in it, or take the group out of configure_optimizers and say the tables'"
                " optimiser with apply_optimizer_in_backward or sparse_optimizer"
            )
        kept.append(dense)
        removed.update(dict.fromkeys(found))
    for group, dense in zip(optimizer.param_groups, kept, strict=True):
        group["params"] = dense
    for parameter in [key for key in optimizer.state if tables.name_of(key) is not None]:
        del optimizer.state[parameter]
    return list(removed)


def base_learning_rate(optimizer: torch.optim.Optimizer) -> float:
    """The rate that a scheduler counts an optimiser's from: ``initial_lr`` of its first group.

    A one-cycle schedule begins far below the rate that it is given, and says that as ``max_lr``. 0.0 where no scheduler
    has ever been attached (there is no ``initial_lr`` then).
    """
    group = optimizer.param_groups[0]
    return float(group.get("max_lr", group.get("initial_lr", 0.0)))


def learning_rate_factor(optimizer: torch.optim.Optimizer, base: float | None = None) -> float:
    """How far an optimiser's rate is from where it began: ``lr / base`` of its first group; 1.0 where that was zero.

    Args:
        optimizer: whose rate it is.
        base: what :func:`base_learning_rate` said before a callback (``LearningRateFinder``) wrote over it; by default
            what it says now.
    """
    base = base_learning_rate(optimizer) if base is None else base
    return float(optimizer.param_groups[0]["lr"]) / base if base else 1.0
