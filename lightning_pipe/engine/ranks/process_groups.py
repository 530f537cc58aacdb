"""Process groups beside the default one, without the threads that each costs with Gloo.

What may be under way at the same time needs a process group of its own, so that ranks cannot mistake one's messages for
another's. A group of Gloo's has three threads: one that listens to its sockets and two that run its collectives. On a
step of some milliseconds and as many ranks as cores they take a fifth of the time, most of it for waking each other.
The groups made here listen in the default group's thread, and run their collectives in one, in the order they were
asked for, as NCCL does.

They are Gloo's by name as well, which PyTorch asks of a group that sharded tensors live in.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["new_group"]

# What they are made by, as PyTorch's registry knows it.
_NAME = "gloo_of_lightning_pipe"


def new_group(
    ranks: Sequence[int] | None = None, *, timeout: timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """``torch.distributed.new_group``, which all ranks call; where both are Gloo's, in the default group's thread.

    Args:
        ranks: of the group, by default all.
        timeout: of a collective, by default PyTorch's.
        backend: by default the default group's.

    Returns:
        The group; on ranks that are not in it ``GroupMember.NON_GROUP_MEMBER``.
    """
    shared = (backend or dist.get_backend()) == "gloo" and _listening() is not None
    if shared and not hasattr(dist.Backend, _NAME.upper()):
        devices = dist.Backend.backend_capability[dist.Backend.GLOO]
        dist.Backend.register_backend(_NAME, _make, extended_api=True, devices=list(devices))
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, backend=_NAME if shared else backend)
    if shared and isinstance(group, dist.ProcessGroup):
        _name(group)
    return group


def _name(group: Any) -> None:
    """As ``torch.distributed.new_group`` leaves one of Gloo's."""
    gloo = dist.ProcessGroup.BackendType.GLOO
    for device in dist.Backend.backend_capability[dist.Backend.GLOO]:
        group._register_backend(torch.device(device), gloo, group._get_backend(torch.device("cpu")))
    group._set_default_backend(gloo)
    groups = dist.distributed_c10d._world.pg_map
    groups[group] = dist.Backend(dist.Backend.GLOO), groups[group][1]


def _listening() -> list[Any] | None:
    """The sockets of the default group; None where it has none, or something is wrapped around it."""
    try:
        default = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        return getattr(default.options, "_devices", None) if isinstance(default, dist.ProcessGroupGloo) else None
    except (AttributeError, RuntimeError, ValueError):  # another version of PyTorch; no backend for the CPU
        return None


def _make(asked: Any, _: Any) -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = _listening()
    options._threads = 1
    options._timeout = asked.timeout
    options.global_ranks_in_group = asked.global_ranks_in_group
    options.group_name = asked.group_id
    return dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, options)
