"""Open batches, whose rows are in use from their prefetch to the end of their training."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from lightning_pipe.recsys.dynamic.cache.id_map import Slots
from lightning_pipe.recsys.dynamic.cache.row_columns import Mark
from lightning_pipe.recsys.dynamic.cache.row_headers import BatchStart


@dataclass(eq=False)
class OpenBatch:
    """State of a batch, whose distinct *rows* are not reused while it is open."""

    rows: Slots
    begun: BatchStart | None = None
    ended: bool = False
    mark: Mark | None = None  # after its use on the device, if it was discarded explicitly


class PinnedCacheSlots:
    """Slots of a batch's ids, int64 on the host, which stay its own. A garbage collected ticket discards its batch."""

    __slots__ = ("__weakref__", "_dropped", "batch", "slots")

    def __init__(self, slots: Tensor, batch: OpenBatch, dropped: deque[OpenBatch]) -> None:
        self.slots = slots
        self.batch = batch
        self._dropped = dropped

    def __del__(self) -> None:
        # May run anywhere, on any thread, even one that holds the lock. It must not take a lock.
        self._dropped.append(self.batch)
