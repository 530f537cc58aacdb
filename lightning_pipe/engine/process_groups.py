"""Process groups beside the default one, without the threads that each costs with Gloo.

What may be under way at the same time needs a process group of its own, so that ranks cannot mistake one's messages for
another's. A group of Gloo's has three threads: one that listens to its sockets and two that run its collectives. On a
step of some milliseconds and as many ranks as cores they take a fifth of the time, most of it for waking each other.
The groups made here listen in the default group's thread, and run their collectives in one, in the order they were
asked for, as NCCL does.

They do not have Gloo's name, which PyTorch asks a group for that sharded tensors live in: those take another
(``torch.distributed.new_group``).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["is_gloo", "new_group"]

# As PyTorch's registry knows it; get_backend() says so of these groups.
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
    if (backend or dist.get_backend()) == "gloo" and _listening() is not None:
        if not hasattr(dist.Backend, _NAME.upper()):
            devices = dist.Backend.backend_capability[dist.Backend.GLOO]
            dist.Backend.register_backend(_NAME, _make, extended_api=True, devices=list(devices))
        backend = _NAME
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, backend=backend)
    return group


def is_gloo(group: dist.ProcessGroup | None = None) -> bool:
    """Whether collectives of *group* are Gloo's."""
    return dist.get_backend(group) in ("gloo", _NAME)


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
