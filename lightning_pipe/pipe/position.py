"""Position of a pipe, for use in layers: the current micro-batch, and a flag for recomputation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class MicroBatchPosition(NamedTuple):
    """Position of a running pipe."""

    micro_batch: int
    micro_batches: int
    recomputing: bool
    mini_batch: object = None


class _CurrentPosition(threading.local):
    position: MicroBatchPosition | None = None


_current = _CurrentPosition()


def get_micro_batch_position() -> MicroBatchPosition | None:
    """Position of the pipe that runs the calling layer; None outside of a pipe."""
    return _current.position


def is_recomputing() -> bool:
    """Return True if the calling layer is recomputed, because its activations were discarded in forward."""
    return _current.position is not None and _current.position.recomputing


@contextmanager
def set_micro_batch_position(micro_batch_position: MicroBatchPosition) -> Iterator[None]:
    """Context in which this thread has the position *micro_batch_position*."""
    before, _current.position = _current.position, micro_batch_position
    try:
        yield
    finally:
        _current.position = before
