"""Hash map from int64 ids to cache slots, with operations on whole batches.

The compiled table uses open addressing with software prefetching over the batch. ``DeviceIdMap`` is a table in tensors,
for a GPU, and for a host without the compiled library.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.store.row_store import Keys
from lightning_pipe.recsys.kernels import native

Slots = npt.NDArray[np.int64]

# Ticks are stored in 32 bits.
LAST_TICK = 2**32 - 1

_MOST_SLOTS = 2**31 - 1
# Same layout as Entry in csrc/id_map.cpp.
_ENTRY = np.dtype([("key", np.int64), ("slot", np.int32), ("tick", np.uint32)])


class IdMap(ABC):
    """Map of ids to slots, with the tick of each slot's last use. Every int64 is a valid id. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        if not 1 <= capacity <= _MOST_SLOTS:
            raise SetupError(f"the capacity of an id map is {capacity} slots; expected 1 to {_MOST_SLOTS}")
        self.capacity = capacity
        self._keys = np.zeros(capacity, np.int64)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    @abstractmethod
    def find(self, keys: Keys) -> Slots:
        """Slots of *keys*, which may repeat; -1 for keys without a slot."""

    @abstractmethod
    def touch(self, keys: Keys, tick: int) -> tuple[Slots, Slots, Slots]:
        """Find *keys*, which may repeat, and record their use: slots, distinct slots, and indices of missing keys."""

    def insert(self, keys: Keys, slots: Slots, tick: int = 0) -> None:
        """Assign *slots*, distinct and free, to *keys*, distinct and not in the map."""
        self._insert(keys, slots, tick)
        self._keys[slots] = keys
        self._used += len(keys)

    def remove(self, slots: Slots) -> None:
        """Free *slots*, distinct and in use."""
        self._remove(self._keys[slots], slots)
        self._used -= len(slots)

    def keys_of(self, slots: Slots) -> Keys:
        """Ids of *slots* in use."""
        return self._keys[slots]

    @abstractmethod
    def ticks(self) -> npt.NDArray[np.int64]:
        """Tick of the last use of each slot; 0 for free slots."""

    @abstractmethod
    def reset_ticks(self) -> None:
        """Set the ticks of all slots to 0."""

    def clear(self) -> None:
        """Free all slots."""
        self._clear()
        self._used = 0

    @abstractmethod
    def _insert(self, keys: Keys, slots: Slots, tick: int) -> None: ...

    @abstractmethod
    def _remove(self, keys: Keys, slots: Slots) -> None: ...

    @abstractmethod
    def _clear(self) -> None: ...


def id_map(capacity: int) -> IdMap:
    """Map in host memory. The compiled one takes 32 to 64 bytes per slot."""
    library = native.load_native_library()
    return DeviceIdMap(capacity, torch.device("cpu")) if library is None else _CompiledMap(library, capacity)


class _CompiledMap(IdMap):
    def __init__(self, library: ctypes.CDLL, capacity: int) -> None:
        super().__init__(capacity)
        # At most half full.
        self._bits = max(1, (2 * capacity - 1).bit_length())
        self._entries = np.empty(1 << self._bits, _ENTRY)
        self._clear()
        self._library = library

    def find(self, keys: Keys) -> Slots:
        keys, slots = np.ascontiguousarray(keys), np.empty(len(keys), np.int64)
        self._library.lp_id_map_find(*self._arguments(keys), _get_array_pointer(slots))
        return slots

    def touch(self, keys: Keys, tick: int) -> tuple[Slots, Slots, Slots]:
        keys = np.ascontiguousarray(keys)
        slots, touched, missing = (np.empty(len(keys), np.int64) for _ in range(3))
        counts = np.empty(2, np.int64)
        self._library.lp_id_map_touch(
            *self._arguments(keys),
            ctypes.c_uint32(tick),
            *(_get_array_pointer(array) for array in (slots, touched, missing, counts)),
        )
        distinct, misses = counts.tolist()
        return slots, touched[:distinct], missing[:misses]

    def _insert(self, keys: Keys, slots: Slots, tick: int) -> None:
        keys, slots = np.ascontiguousarray(keys), np.ascontiguousarray(slots)
        self._library.lp_id_map_insert(*self._arguments(keys), _get_array_pointer(slots), ctypes.c_uint32(tick))

    def _remove(self, keys: Keys, slots: Slots) -> None:
        self._library.lp_id_map_remove(*self._arguments(keys))

    def ticks(self) -> npt.NDArray[np.int64]:
        ticks = np.zeros(self.capacity, np.int64)
        self._library.lp_id_map_ticks(
            _get_array_pointer(self._entries), ctypes.c_int64(self._bits), _get_array_pointer(ticks)
        )
        return ticks

    def reset_ticks(self) -> None:
        self._entries["tick"] = 0

    def _clear(self) -> None:
        self._entries["slot"] = -1

    def _arguments(self, keys: Keys) -> tuple[ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]:
        return (
            _get_array_pointer(self._entries),
            ctypes.c_int64(self._bits),
            _get_array_pointer(keys),
            ctypes.c_int64(len(keys)),
        )


class DeviceIdMap(IdMap):
    """Sorted ids in tensors, searched by halves; no operation waits for the device.

    Ticks, and changes that the device does not have yet, are on the host.

        device   look ─┐ distinct slots                     ┌─ apply ─
        host           └─ and ids without a slot ── pin ────┘ changes of the map
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        super().__init__(capacity)
        self._device = device
        self._last = torch.zeros(capacity + 1, dtype=torch.int64, device=device)
        self._ready: torch.cuda.Event | None = None
        # Ids in order, and their slots.
        self._table = torch.empty(2, 0, dtype=torch.int64, device=device)
        self._removed: list[Keys] = []
        self._inserted: list[tuple[Keys, Slots]] = []
        self._ticks = np.zeros(capacity, np.int64)

    def lookup(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Search for *ids* [n], int64 on the device, which may repeat.

        Returns the slots [n], -1 for ids without a slot, and a summary for the host, [n + 2]: number of distinct slots,
        number of ids without a slot, the distinct slots, and, at the end, the ids without a slot.
        """
        if self._removed or self._inserted:
            # Left by a batch that failed.
            self.apply(*(part.to(self._device) for part in self.changes()))
        self._make_stream_wait_for_change()
        slots, place = self._find(ids), torch.arange(len(ids), device=self._device)
        missing = slots < 0
        row = torch.where(missing, self.capacity, slots)
        # One of the places of a slot is the last one written, whichever it is.
        first = (self._last.scatter_(0, row, place)[row] == place) & ~missing
        counts = torch.stack([first.sum(), missing.sum()])
        at_end = missing.cumsum(0) - 1 + len(ids) - counts[1]
        targets = torch.where(first, first.cumsum(0) - 1, torch.where(missing, at_end, len(ids)))
        summary = ids.new_zeros(len(ids) + 1).scatter_(0, targets, torch.where(missing, ids, slots))
        return slots, torch.cat([counts, summary[:-1]])

    def record_slot_use(self, summary: Tensor, tick: int) -> tuple[Slots, Keys]:
        """Record the use of ``lookup``'s slots, from its summary on the host; return them and the ids without one."""
        distinct, misses = summary[:2].tolist()
        slots, keys = summary[2 : 2 + distinct].numpy(), summary[len(summary) - misses :].numpy()
        self._ticks[slots] = tick
        return slots, keys

    def changes(self) -> list[Tensor]:
        """Changes for ``apply``, on the host: ids that were removed, ids that were inserted, and their slots."""
        ids, slots = zip(*self._inserted, strict=True) if self._inserted else ((), ())
        return [
            torch.from_numpy(np.concatenate([np.empty(0, np.int64), *part])) for part in (self._removed, ids, slots)
        ]

    def apply(self, removed: Tensor, ids: Tensor, slots: Tensor) -> None:
        """Make all changes, which the caller has copied to the device, in the table."""
        self._make_stream_wait_for_change()
        current, inserted = self._table, torch.stack([ids, slots])[:, ids.argsort()]
        size = current.shape[1] - len(removed) + len(ids)
        stays = torch.ones_like(current[0]).index_fill_(0, torch.searchsorted(current[0], removed), 0)
        before = torch.cat([stays.new_zeros(1), stays.cumsum(0)])
        # Removed ids go to an additional column.
        merged = current.new_empty(2, size + 1)
        targets = torch.where(stays > 0, before[:-1] + torch.searchsorted(inserted[0], current[0]), size)
        merged.index_copy_(1, targets, current)
        place = torch.arange(len(ids), device=self._device)
        merged.index_copy_(1, before[torch.searchsorted(current[0], inserted[0])] + place, inserted)
        self._table = merged[:, :size]
        self._removed, self._inserted = [], []
        if self._device.type == "cuda":
            self._ready = torch.cuda.current_stream(self._device).record_event()

    def find(self, keys: Keys) -> Slots:
        slots: Slots = self.lookup(torch.from_numpy(keys).to(self._device))[0].cpu().numpy()
        return slots

    def touch(self, keys: Keys, tick: int) -> tuple[Slots, Slots, Slots]:
        slots, summary = self.lookup(torch.from_numpy(keys).to(self._device))
        on_host: Slots = slots.cpu().numpy()
        return on_host, self.record_slot_use(summary.cpu(), tick)[0], np.flatnonzero(on_host < 0)

    def _insert(self, keys: Keys, slots: Slots, tick: int) -> None:
        self._ticks[slots] = tick
        self._inserted.append((keys, slots))

    def _remove(self, keys: Keys, slots: Slots) -> None:
        if self._inserted:
            # Removals come first.
            self.lookup(torch.empty(0, dtype=torch.int64, device=self._device))
        self._ticks[slots] = 0
        self._removed.append(keys)

    def ticks(self) -> npt.NDArray[np.int64]:
        return self._ticks.copy()

    def reset_ticks(self) -> None:
        self._ticks[:] = 0

    def _clear(self) -> None:
        self._table = self._table[:, :0]
        self._removed, self._inserted = [], []
        self._ticks[:] = 0

    def _find(self, ids: Tensor) -> Tensor:
        sorted_ids, slots = self._table
        if not len(sorted_ids):
            return torch.full_like(ids, -1)
        positions = torch.searchsorted(sorted_ids, ids).clamp_(max=len(sorted_ids) - 1)
        return torch.where(sorted_ids[positions] == ids, slots[positions], -1)

    def _make_stream_wait_for_change(self) -> None:
        """Order the current stream after the last change, which another stream may have made."""
        if self._ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(self._ready)
            self._table.record_stream(stream)


def _get_array_pointer(array: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
