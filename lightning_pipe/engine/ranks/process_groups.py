"""Additional Gloo process groups that share the network thread of the default group.

Communication that runs concurrently needs separate process groups, so that ranks cannot confuse messages. A Gloo group
has five threads, one of which listens to its sockets. With two ranks on two cores, three such groups take 0.3 to 0.8 ms
more processor time per rank and step than groups created here: 3 to 8 % of a step of 10 ms. Groups created here listen
in the default group's thread and run their collectives in a single thread, in the order of submission, as NCCL does.

Their backend name is also "gloo", which PyTorch requires for the process group of sharded tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, cast
from unittest.mock import patch

import torch.distributed as dist

from lightning_pipe._compat.torch import default_gloo_devices, gloo_of_one_thread, present_as_gloo, timeout_of
from lightning_pipe.engine.ranks.exit import keep_tensors_at_exit

# Name of the backend in PyTorch's registry.
_NAME = "gloo_of_lightning_pipe"


def new_group(
    ranks: Sequence[int] | None = None, *, timeout: timedelta | None = None, backend: str | None = None
) -> dist.ProcessGroup:
    """Create a process group like ``torch.distributed.new_group``. All ranks call this.

    If the new group and the default group both use Gloo, the new group shares the default group's network thread.
    """
    keep_tensors_at_exit()
    shared = (backend or dist.get_backend()) == "gloo" and default_gloo_devices() is not None
    if shared and not hasattr(dist.Backend, _NAME.upper()):
        devices = dist.Backend.backend_capability[dist.Backend.GLOO]
        dist.Backend.register_backend(_NAME, _make, extended_api=True, devices=list(devices))
    timeout = timeout or timeout_of()
    group: Any = dist.new_group(ranks, timeout=timeout, backend=_NAME if shared else backend)
    if shared and isinstance(group, dist.ProcessGroup):
        present_as_gloo(group)
    return cast(dist.ProcessGroup, group)


@contextmanager
def default_timeout() -> Iterator[None]:
    """Context in which groups that other libraries make without a timeout get the default group's.

    TorchRec makes groups for the ranks of a node and for ranks across nodes, and PyTorch one for each dimension of a
    mesh. They would wait 30 minutes for a node that is gone without a closed connection.
    """
    timeout = timeout_of()
    with ExitStack() as patches:
        for name in "default_pg_timeout", "default_pg_nccl_timeout":
            patches.enter_context(patch.object(dist.distributed_c10d, name, timeout))
        yield


def _make(asked: Any, _: Any) -> Any:
    devices = default_gloo_devices()
    assert devices is not None
    return gloo_of_one_thread(asked, devices)
