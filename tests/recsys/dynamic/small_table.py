"""A cache of four rows, small enough to say what is in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_pipe.recsys.dynamic.cache.initial_values import InitialValues
from lightning_pipe.recsys.dynamic.cache.row_cache import RowCache
from lightning_pipe.recsys.dynamic.cache.ticket import PinnedCacheSlots
from lightning_pipe.recsys.dynamic.store.buffered_store import SharedStore, TableStore
from tests.recsys.dynamic.memory_store import MemoryStore

CAPACITY = 4


def first_values(ids: Tensor) -> Tensor:
    return torch.stack([ids.float(), -ids.float()], dim=1)


class Table:
    """A cache of four rows of two weights and one state; training adds 1 to all three."""

    def __init__(self, store: MemoryStore | None = None, capacity: int = CAPACITY, **options: Any) -> None:
        self.weights, self.states = torch.zeros(capacity, 2), torch.zeros(capacity)
        self.store = store or MemoryStore({"t": 16 + 8 + 4})
        self.shared = SharedStore(self.store)
        initial = options.pop("initial", first_values)
        self.cache = RowCache(
            "t",
            [self.weights, self.states],
            TableStore(self.shared, "t"),
            initial=InitialValues("t", 2, initial),
            state_fill=[0.5],
            **options,
        )

    def prefetch(self, *ids: int) -> PinnedCacheSlots:
        return self.cache.prefetch(torch.tensor(ids, dtype=torch.int64))

    def backward(self, ticket: PinnedCacheSlots) -> None:
        rows = ticket.slots.unique()
        self.weights[rows] += 1
        self.states[rows] += 1

    def train(self, step: int, *ids: int) -> None:
        ticket = self.prefetch(*ids)
        self.cache.begin_batch_and_count_ids(ticket, step)
        self.backward(ticket)
        self.cache.end_trained(ticket)

    def look(self, *ids: int) -> list[tuple[float, float]]:
        """First weight and state, as an evaluation sees them."""
        ticket = self.prefetch(*ids)
        found = list(zip(self.weights[ticket.slots, 0].tolist(), self.states[ticket.slots].tolist(), strict=True))
        self.cache.end_untrained(ticket)
        return found

    def stored(self) -> dict[int, tuple[int, int]]:
        """Count and last step of what the store has."""
        return {
            key: tuple(np.frombuffer(record[:16], np.int64).tolist()) for key, record in self.store.tables["t"].items()
        }
