"""The caches of one sharded dynamic module on one rank, and the store behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_pipe.recsys.agreement import Agreement
from lightning_pipe.recsys.dynamic.batch_rows import BatchRows
from lightning_pipe.recsys.dynamic.row_cache import RowCache, Ticket

__all__ = ["RowTables"]


class RowTables:
    """Caches by table.

    Args:
        caches: each table's.
        tables_of_keys: for each key of the distributed features, in order, the table that it is looked up in.
        device: of the caches.
        agreement: among the ranks that share the ids.
    """

    def __init__(
        self,
        caches: Mapping[str, RowCache],
        tables_of_keys: Sequence[str],
        device: torch.device,
        agreement: Agreement,
    ) -> None:
        self.agreement = agreement
        self.caches = dict(caches)
        # Keys of one table follow one another, so that its ids are one piece of the values.
        self._runs = [
            (table, run[0], run[-1] + 1)
            for table, run in (
                (table, [position for position, _ in pairs])
                for table, pairs in groupby(enumerate(tables_of_keys), key=itemgetter(1))
            )
        ]
        self._device = device
        self._last_use: torch.cuda.Event | None = None
        self.batches = 0

    def prefetch(self, features: KeyedJaggedTensor) -> BatchRows:
        """Brings the rows of a batch into the caches, where they stay until it ends.

        Args:
            features: distributed ones, whose values are mixed ids that this rank owns.
        """
        self._wait_for_last_use()
        ids = features.values()
        offsets = features.offset_per_key()
        slots = torch.empty_like(ids, dtype=torch.int64)
        tickets: list[tuple[RowCache, Ticket]] = []
        rows = BatchRows(None, ())
        try:
            for table, begin, end in self._runs:
                where = slice(offsets[begin], offsets[end])
                cache = self.caches[table]
                ticket = cache.prefetch(ids[where])
                tickets.append((cache, ticket))
                slots[where] = ticket.slots
        except Exception as error:
            for cache, ticket in tickets:
                cache.discard(ticket)
            rows.error = error
            return rows
        return BatchRows(_with_values(features, slots), tickets, on_end=self._ended)

    def sizes(self) -> Iterator[tuple[str, int]]:
        """Slots of each table."""
        for name, cache in self.caches.items():
            yield name, cache.capacity

    def _ended(self, trained: bool) -> None:
        if self._device.type == "cuda":
            # Slots that are let go of may be in use by kernels yet to run: who fills them waits for these.
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._last_use = event
        if trained:
            self.batches += 1

    def _wait_for_last_use(self) -> None:
        event = self._last_use
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def _with_values(features: KeyedJaggedTensor, values: torch.Tensor) -> KeyedJaggedTensor:
    """The same features over other values."""
    variable = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=values,
        weights=features.weights_or_none(),
        lengths=features.lengths_or_none(),
        offsets=features.offsets_or_none(),
        stride=None if variable else features.stride(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() if variable else None,
        length_per_key=features.length_per_key_or_none(),
        offset_per_key=features.offset_per_key_or_none(),
        index_per_key=None,
        inverse_indices=features.inverse_indices_or_none(),
    )
