"""The seed of persistent workers, which a loader draws once, when it starts them.

A run that continues from a checkpoint starts them again. If that drew from the generators that the model draws from,
dropout would differ from then on from that of a run without an interruption.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import DataLoader

__all__ = ["forget_workers", "starting_without_a_draw", "workers_wait"]


def workers_wait(loader: Any) -> bool:
    """Return whether a loader's persistent workers have been started, and wait for its next iteration."""
    return isinstance(loader, DataLoader) and loader._iterator is not None


def forget_workers(loader: Any) -> None:
    """Let the next iteration of a loader start workers, as that of a new loader does."""
    if isinstance(loader, DataLoader):
        loader._iterator = None


def starting_without_a_draw(loader: Any) -> Any:
    """The same loader, which starts its persistent workers without drawing their seed from any generator in use."""
    if not isinstance(loader, DataLoader) or workers_wait(loader):
        return loader
    # The user's own stays as it is. A loader draws nothing else from this generator; its sampler holds its own.
    same = copy.copy(loader)
    same.generator = torch.Generator()
    return same
