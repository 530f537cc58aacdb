"""Ranks compare what they know, and raise errors together: one rank's bad batch must not leave the others waiting.

Tested in ``tests/recsys/sharding/test_shard.py``.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_pipe.engine.plans.errors import InputError
from lightning_pipe.engine.ranks.together import gather

__all__ = ["Agreement", "describe_error"]

T = TypeVar("T")


def describe_error(error: BaseException) -> str:
    """An error of this project says all in its message; of any other, the class belongs to the description."""
    return str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"


class Agreement:
    """Collectives for rare, small things. All ranks must call each method in the same order, from one thread.

    Args:
        group: over all ranks; None for a single process.
        device: where the group's backend wants its tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group if group is not None and group.size() > 1 else None
        self._device = device

    @property
    def rank(self) -> int:
        return 0 if self._group is None else self._group.rank()

    def gather(self, value: T) -> list[T]:
        """Every rank's ``value``, in rank order."""
        if self._group is None:
            return [value]
        return gather(value, self._group)

    def any_of(self, flags: list[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank."""
        if self._group is None or not flags:
            return flags
        reduced = torch.tensor(flags, dtype=torch.int32, device=self._device)
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in reduced.tolist()]

    def raise_together(self, error: Exception | None) -> None:
        """Raises on every rank if ``error`` is not None on any: one small collective if all is well."""
        if any(self.any_of([error is not None])):
            self.raise_gathered(error)

    def raise_gathered(self, error: Exception | None) -> None:
        """Raises InputError with the errors of all ranks, where all ranks know already that one of them has one."""
        if self._group is None:
            assert error is not None
            raise error
        texts = self.gather(None if error is None else describe_error(error))
        if error is not None and not isinstance(error, InputError):
            raise error  # users expect to catch what they raised
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
        raise InputError("\n".join(failed)) from error
