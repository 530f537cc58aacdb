"""Random numbers for work that runs ahead.

Fetching and the transfer hooks run some batches before the batch being trained. If they drew from the same generators
as the model, how far ahead a plan runs would change what dropout draws. So they draw from streams of their own, which
makes every plan draw the same. The first fetch of an epoch comes before any of its training, in every plan and in
Lightning's own loop: it uses the common stream, so a sampler is seeded as it is there.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class RandomStreams:
    """The generators of PyTorch (CPU, and CUDA if the device is one), NumPy and Python, in a second set of states.

    Args:
        device: the device whose generator the transfer hooks may use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: list[Any] | None = None

    def restart(self) -> None:
        """Begin an epoch: the next block uses the common streams, and the blocks after it a copy of their state."""
        self._own = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Draw from the second set in the body."""
        generators = self._generators()
        if self._own is None:
            yield
            self._own = [get() for get, _ in generators]
            return
        common = [get() for get, _ in generators]
        _restore(generators, self._own)
        try:
            yield
        finally:
            self._own = [get() for get, _ in generators]
            _restore(generators, common)

    def _generators(self) -> list[tuple[Callable[[], Any], Callable[[Any], None]]]:
        generators: list[tuple[Callable[[], Any], Callable[[Any], None]]] = [
            (torch.get_rng_state, torch.set_rng_state),
            (random.getstate, random.setstate),
        ]
        # Whoever draws from NumPy has imported it.
        if (numpy := sys.modules.get("numpy")) is not None:
            generators.append((numpy.random.get_state, numpy.random.set_state))
        if self._device.type == "cuda":
            device = self._device
            generators.append(
                (lambda: torch.cuda.get_rng_state(device), lambda state: torch.cuda.set_rng_state(state, device))
            )
        return generators


def _restore(generators: list[tuple[Callable[[], Any], Callable[[Any], None]]], states: list[Any]) -> None:
    # NumPy may have been imported since the states were taken: it then keeps the state it has.
    for (_, put), state in zip(generators, states, strict=False):
        put(state)
