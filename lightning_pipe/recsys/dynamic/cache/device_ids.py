"""Map of ids to slots in tensors, which may be on a GPU: sorted ids, searched by halves.

    device   look ─┐ distinct slots                     ┌─ apply ─
    host           └─ and ids without a slot ── pin ────┘ changes of the map

No operation waits for the device, and any int64 is an id.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_pipe.recsys.dynamic.cache.id_map import IdTable, Slots
from lightning_pipe.recsys.dynamic.store.row_store import Keys


class DeviceIds(IdTable):
    """Table of an ``IdMap`` on a device. Ticks, and changes that the device does not have yet, are on the host."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._capacity, self._device = capacity, device
        self._last = torch.zeros(capacity + 1, dtype=torch.int64, device=device)
        self._ready: torch.cuda.Event | None = None
        # Ids in order, and their slots.
        self._table = torch.empty(2, 0, dtype=torch.int64, device=device)
        self._gone: list[Keys] = []
        self._new: list[tuple[Keys, Slots]] = []
        self._ticks = np.zeros(capacity, np.int64)

    def look(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Search for *ids* [n], int64 on the device, which may repeat."""
        if self._gone or self._new:
            # Left by a batch that failed.
            self.apply(*(part.to(self._device) for part in self.changes()))
        self._order()
        slots, place = self._find(ids), torch.arange(len(ids), device=self._device)
        missing = slots < 0
        row = torch.where(missing, self._capacity, slots)
        # One of the places of a slot is the last one written, whichever it is.
        first = (self._last.scatter_(0, row, place)[row] == place) & ~missing
        counts = torch.stack([first.sum(), missing.sum()])
        at_end = missing.cumsum(0) - 1 + len(ids) - counts[1]
        to = torch.where(first, first.cumsum(0) - 1, torch.where(missing, at_end, len(ids)))
        found = ids.new_zeros(len(ids) + 1).scatter_(0, to, torch.where(missing, ids, slots))
        return slots, torch.cat([counts, found[:-1]])

    def use(self, found: Tensor, tick: int) -> tuple[Slots, Keys]:
        """Record the use of what ``look`` found, copied to the host; return distinct slots, and ids without a slot."""
        rows, without = found[:2].tolist()
        slots, keys = found[2 : 2 + rows].numpy(), found[len(found) - without :].numpy()
        self._ticks[slots] = tick
        return slots, keys

    def changes(self) -> list[Tensor]:
        """Changes for ``apply``, on the host: ids that were removed, ids that were inserted, and their slots."""
        ids, slots = zip(*self._new, strict=True) if self._new else ((), ())
        return [torch.from_numpy(np.concatenate([np.empty(0, np.int64), *part])) for part in (self._gone, ids, slots)]

    def apply(self, gone: Tensor, ids: Tensor, slots: Tensor) -> None:
        """Make all changes, which the caller has copied to the device, in the table."""
        self._order()
        old, new = self._table, torch.stack([ids, slots])[:, ids.argsort()]
        size = old.shape[1] - len(gone) + len(ids)
        stays = torch.ones_like(old[0]).index_fill_(0, torch.searchsorted(old[0], gone), 0)
        before = torch.cat([stays.new_zeros(1), stays.cumsum(0)])
        # Removed ids go to an additional column.
        table = old.new_empty(2, size + 1)
        to = torch.where(stays > 0, before[:-1] + torch.searchsorted(new[0], old[0]), size)
        table.index_copy_(1, to, old)
        place = torch.arange(len(ids), device=self._device)
        table.index_copy_(1, before[torch.searchsorted(old[0], new[0])] + place, new)
        self._table = table[:, :size]
        self._gone, self._new = [], []
        if self._device.type == "cuda":
            self._ready = torch.cuda.current_stream(self._device).record_event()

    def find(self, keys: Keys) -> Slots:
        slots: Slots = self.look(torch.from_numpy(keys).to(self._device))[0].cpu().numpy()
        return slots

    def touch(self, keys: Keys, tick: int) -> tuple[Slots, Slots, Slots]:
        slots, found = self.look(torch.from_numpy(keys).to(self._device))
        on_host: Slots = slots.cpu().numpy()
        return on_host, self.use(found.cpu(), tick)[0], np.flatnonzero(on_host < 0)

    def insert(self, keys: Keys, slots: Slots, tick: int) -> None:
        self._ticks[slots] = tick
        self._new.append((keys, slots))

    def remove(self, keys: Keys, slots: Slots) -> None:
        if self._new:
            # Removals come first.
            self.look(torch.empty(0, dtype=torch.int64, device=self._device))
        self._ticks[slots] = 0
        self._gone.append(keys)

    def ticks(self) -> npt.NDArray[np.int64]:
        return self._ticks.copy()

    def reset_ticks(self) -> None:
        self._ticks[:] = 0

    def clear(self) -> None:
        self._table = self._table[:, :0]
        self._gone, self._new = [], []
        self._ticks[:] = 0

    def _find(self, ids: Tensor) -> Tensor:
        held, slots = self._table
        if not len(held):
            return torch.full_like(ids, -1)
        at = torch.searchsorted(held, ids).clamp_(max=len(held) - 1)
        return torch.where(held[at] == ids, slots[at], -1)

    def _order(self) -> None:
        """Order the current stream after the last change, which another stream may have made."""
        if self._ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._ready)
            self._table.record_stream(stream)
