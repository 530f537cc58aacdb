"""What a layer can ask of the forward that it runs in: which micro-batch it is, and whether it runs again.

Tested in ``tests/pipe/test_batch_norm.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["Position", "is_recomputing", "position"]


class Position(NamedTuple):
    """Where a pipe is.

    Args:
        micro_batch: its index.
        micro_batches: how many there are: fewer than the pipe's ``chunks`` where the mini-batch has fewer rows.
        recomputing: whether this forward has run before, without its graph.
        mini_batch: the same object for all micro-batches of a mini-batch, and for no others.
    """

    micro_batch: int
    micro_batches: int
    recomputing: bool
    mini_batch: object = None


class _CurrentPosition(threading.local):
    def __init__(self) -> None:
        self.position: Position | None = None


_current = _CurrentPosition()


def position() -> Position | None:
    """Where the pipe is whose layer asks; None outside of a pipe."""
    return _current.position


def is_recomputing() -> bool:
    """Whether the layer that asks runs for the second time, since its activations were not kept."""
    return _current.position is not None and _current.position.recomputing


@contextmanager
def at(where: Position) -> Iterator[None]:
    """In the body this thread is there."""
    before, _current.position = _current.position, where
    try:
        yield
    finally:
        _current.position = before
