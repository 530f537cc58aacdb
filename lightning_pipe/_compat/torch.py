"""Private names of PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._pytree import (
    TreeSpec,
    register_pytree_node,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "TreeSpec",
    "backend_of",
    "default_gloo_devices",
    "gloo_of_one_thread",
    "overflow_flags",
    "present_as_gloo",
    "pytree",
    "register_pytree_node",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]

_CPU = torch.device("cpu")


def backend_of(group: dist.ProcessGroup, device: torch.device = _CPU) -> Any:
    """The object that runs a group's collectives of tensors on *device*.

    Raises:
        RuntimeError: the group has none for this device.
    """
    return group._get_backend(device)


def default_gloo_devices() -> list[Any] | None:
    """The sockets of the default process group; None if it is not Gloo's own, or is wrapped."""
    try:
        default = backend_of(dist.distributed_c10d._get_default_group())
    except (AttributeError, RuntimeError, ValueError):  # another PyTorch; no backend for the CPU; no default group
        return None
    return getattr(default.options, "_devices", None) if isinstance(default, dist.ProcessGroupGloo) else None


def gloo_of_one_thread(asked: Any, devices: list[Any]) -> Any:
    """A backend of Gloo's with one thread for collectives, which listens in the thread of *devices*.

    ``torch.distributed.new_group`` takes no options for Gloo: its groups have a listening thread and at least two more.

    Args:
        asked: what an extended creator of ``torch.distributed.Backend.register_backend`` is called with.
        devices: of :func:`default_gloo_devices`.
    """
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = devices
    options._threads = 1
    options._timeout = asked.timeout
    options.global_ranks_in_group = asked.global_ranks_in_group
    options.group_name = asked.group_id
    return dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, options)


def present_as_gloo(group: Any) -> None:
    """Let ``torch.distributed.get_backend`` say ``gloo`` of a group that a registered backend made."""
    gloo = dist.ProcessGroup.BackendType.GLOO
    for device in dist.Backend.backend_capability[dist.Backend.GLOO]:
        group._register_backend(torch.device(device), gloo, backend_of(group))
    group._set_default_backend(gloo)
    groups = dist.distributed_c10d._world.pg_map
    groups[group] = dist.Backend(dist.Backend.GLOO), groups[group][1]


def overflow_flags(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> dict[torch.device, torch.Tensor]:
    """The flags by which a scaler skips an optimizer's step, by device: 1 after an overflow, else 0.

    Args:
        scaler: whose ``unscale_`` was called for *optimizer*. It steps only if there is a flag.
        optimizer: the optimizer.
    """
    flags: dict[torch.device, torch.Tensor] = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return flags
