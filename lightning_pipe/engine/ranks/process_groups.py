"""Process groups beside the default one, without the threads that each costs with Gloo.

What may be under way at the same time needs a process group of its own, so that ranks cannot mistake one's messages for
another's. A group of Gloo's has five threads, one of which listens to its sockets. With two ranks on two cores, three
such groups take 0.3 to 0.8 ms of processor time per rank and step more than the groups made here: 3 to 8 % of a step of
10 ms. The groups made here listen in the default group's thread, and run their collectives in one, in the order they
were asked for, as NCCL does.

They are Gloo's by name as well, which PyTorch asks of a group that sharded tensors live in.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_pipe._compat.torch import default_gloo_devices, gloo_of_one_thread, present_as_gloo

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
    shared = (backend or dist.get_backend()) == "gloo" and default_gloo_devices() is not None
    if shared and not hasattr(dist.Backend, _NAME.upper()):
        devices = dist.Backend.backend_capability[dist.Backend.GLOO]
        dist.Backend.register_backend(_NAME, _make, extended_api=True, devices=list(devices))
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout, backend=_NAME if shared else backend)
    if shared and isinstance(group, dist.ProcessGroup):
        present_as_gloo(group)
    return group


def _make(asked: Any, _: Any) -> Any:
    devices = default_gloo_devices()
    assert devices is not None
    return gloo_of_one_thread(asked, devices)
