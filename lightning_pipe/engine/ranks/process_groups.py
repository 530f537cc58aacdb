"""Additional process groups, for communication that runs concurrently: ranks then cannot confuse messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import cast
from unittest.mock import patch

import torch.distributed as dist

from lightning_pipe._compat.torch import get_process_group_timeout
from lightning_pipe.engine.ranks.tensors_at_exit import keep_tensors_alive_at_exit


def new_group(
    ranks: Sequence[int] | None = None, *, timeout: timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """Create a process group like ``torch.distributed.new_group``, by default with the default group's timeout."""
    keep_tensors_alive_at_exit()
    # PyTorch's own default is 30 minutes.
    return cast(
        dist.ProcessGroup, dist.new_group(ranks, timeout=timeout or get_process_group_timeout(), backend=backend)
    )


@contextmanager
def inherit_default_group_timeout() -> Iterator[None]:
    """Context in which groups that other libraries make without a timeout get the default group's, not 30 minutes."""
    timeout = get_process_group_timeout()
    with ExitStack() as patches:
        for name in "default_pg_timeout", "default_pg_nccl_timeout":
            patches.enter_context(patch.object(dist.distributed_c10d, name, timeout))
        yield
