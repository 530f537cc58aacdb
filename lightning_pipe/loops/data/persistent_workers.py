"""Seed of persistent workers, which a loader draws once when it starts them.

A run that resumes from a checkpoint starts the workers again. If their seed were drawn from the generators of the
model, dropout would then differ from that of an uninterrupted run.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import DataLoader


def workers_wait(loader: Any) -> bool:
    """Return True if a loader's persistent workers have been started and wait for its next iteration."""
    return isinstance(loader, DataLoader) and loader._iterator is not None


def starting_without_a_draw(loader: Any) -> Any:
    """Return a loader that starts its persistent workers without drawing their seed from a generator in use."""
    if not isinstance(loader, DataLoader) or workers_wait(loader):
        return loader
    # The user's loader is unchanged. A loader draws only this seed from the generator; its sampler has a separate one.
    same = copy.copy(loader)
    same.generator = torch.Generator()
    return same
