"""What one rank finds out for all: the others need the same, and would find something else or take as long.

Tested in ``tests/strategies/language_model/test_auto.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from lightning_pipe.engine.plans.errors import SetupError

__all__ = ["from_first"]

T = TypeVar("T")


def from_first(work: Callable[[], T], failed: str, group: dist.ProcessGroup | None = None) -> T:
    """What the first rank's *work* gives, on every rank; whatever can be pickled. Each has to call this.

    Args:
        work: done on the first rank alone.
        failed: what it did not do, for the message of an error.
        group: the ranks; the world's where there is none.

    Raises:
        SetupError: on every rank, where the work raised anything. Its own SetupErrors say all themselves.
    """
    found: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank(group) == 0:
        try:
            found[0] = work()
        except Exception as error:  # of whatever kind: the others wait
            said = f"the first rank {failed}: {type(error).__name__}: {error}"
            failure, found[1] = error, str(error) if isinstance(error, SetupError) else said
    dist.broadcast_object_list(found, group=group, group_src=0)
    if found[1] is not None:
        raise SetupError(found[1]) from failure
    return cast(T, found[0])
