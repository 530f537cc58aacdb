"""Hash map from int64 ids to cache slots, with operations on whole batches.

The compiled library uses open addressing with software prefetching over the batch. Without the library, a dictionary
gives the same results. ``DeviceIds`` is a table on a GPU.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from itertools import repeat

import numpy as np
import numpy.typing as npt

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.store.row_store import Keys
from lightning_pipe.recsys.kernels import native

Slots = npt.NDArray[np.int64]

# Ticks are stored in 32 bits.
LAST_TICK = 2**32 - 1

_MOST_SLOTS = 2**31 - 1
# Same layout as Entry in csrc/id_map.cpp.
_ENTRY = np.dtype([("key", np.int64), ("slot", np.int32), ("tick", np.uint32)])


class IdMap:
    """Map of ids to slots, with the tick of each slot's last use. Every int64 is a valid id.

    The compiled version takes 32 to 64 bytes per slot. Not thread-safe.
    """

    def __init__(self, capacity: int, table: IdTable | None = None) -> None:
        if not 1 <= capacity <= _MOST_SLOTS:
            raise SetupError(f"the capacity of an id map is {capacity} slots; expected 1 to {_MOST_SLOTS}")
        self.capacity = capacity
        self._keys = np.zeros(capacity, np.int64)
        library = native.library()
        self._table = table or (_Dictionary(capacity) if library is None else _Compiled(library, capacity))

    def __len__(self) -> int:
        return self._table.used

    def find(self, keys: Keys) -> Slots:
        """Slots of *keys*, which may repeat; -1 for keys without a slot."""
        return self._table.find(_checked(keys))

    def touch(self, keys: Keys, tick: int) -> tuple[Slots, Slots, Slots]:
        """Find the slots of *keys*, which may repeat, and record their use, in one pass."""
        return self._table.touch(_checked(keys), tick)

    def insert(self, keys: Keys, slots: Slots, tick: int = 0) -> None:
        """Assign *slots*, distinct and free, to *keys*, distinct and not in the map."""
        keys = _checked(keys)
        self._table.insert(keys, _checked(slots), tick)
        self._keys[slots] = keys
        self._table.used += len(keys)

    def remove(self, slots: Slots) -> None:
        """Free *slots*, distinct and in use."""
        self._table.remove(self._keys[slots], slots)
        self._table.used -= len(slots)

    def keys_of(self, slots: Slots) -> Keys:
        """Ids of *slots* in use."""
        return self._keys[slots]

    def ticks(self) -> npt.NDArray[np.int64]:
        """Tick of the last use of each slot; 0 for free slots."""
        return self._table.ticks()

    def reset_ticks(self) -> None:
        """Set the ticks of all slots to 0."""
        self._table.reset_ticks()

    def clear(self) -> None:
        """Free all slots."""
        self._table.clear()
        self._table.used = 0


def distinct(keys: Keys) -> tuple[Keys, Slots]:
    """Distinct keys in order of first occurrence, and the index of each of *keys* among them."""
    keys = _checked(keys)
    library = native.library()
    if library is not None:
        return _Compiled(library, max(1, len(keys))).number(keys)
    found, first, places = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return found[order], rank[places]


def _checked(keys: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    if keys.dtype != np.int64 or keys.ndim != 1:
        raise TypeError(f"expected a vector of int64, got {keys.dtype} of shape {keys.shape}")
    return np.ascontiguousarray(keys)


class IdTable(ABC):
    """Table of an ``IdMap``, which describes the methods.

    Attributes:
        used: number of ids, set by the map.
    """

    used = 0

    @abstractmethod
    def find(self, keys: Keys) -> Slots: ...

    @abstractmethod
    def touch(self, keys: Keys, tick: int) -> tuple[Slots, Slots, Slots]: ...

    @abstractmethod
    def insert(self, keys: Keys, slots: Slots, tick: int) -> None: ...

    @abstractmethod
    def remove(self, keys: Keys, slots: Slots) -> None: ...

    @abstractmethod
    def ticks(self) -> npt.NDArray[np.int64]: ...

    @abstractmethod
    def reset_ticks(self) -> None: ...

    @abstractmethod
    def clear(self) -> None: ...


class _Compiled(IdTable):
    def __init__(self, library: ctypes.CDLL, capacity: int) -> None:
        self._capacity = capacity
        # At most half full.
        self._bits = max(1, (2 * capacity - 1).bit_length())
        self._entries = np.empty(1 << self._bits, _ENTRY)
        self.clear()
        self._library = library
        library.lp_id_map_number.restype = ctypes.c_int64

    def find(self, keys: Keys) -> Slots:
        slots = np.empty(len(keys), np.int64)
        self._library.lp_id_map_find(*self._of(keys), _address(slots))
        return slots

    def touch(self, keys: Keys, tick: int) -> tuple[Slots, Slots, Slots]:
        slots, touched, missing = (np.empty(len(keys), np.int64) for _ in range(3))
        counts = np.empty(2, np.int64)
        self._library.lp_id_map_touch(
            *self._of(keys),
            ctypes.c_uint32(tick),
            *(_address(array) for array in (slots, touched, missing, counts)),
        )
        noted, without = counts.tolist()
        return slots, touched[:noted], missing[:without]

    def insert(self, keys: Keys, slots: Slots, tick: int) -> None:
        self._library.lp_id_map_insert(*self._of(keys), _address(slots), ctypes.c_uint32(tick))

    def number(self, keys: Keys) -> tuple[Keys, Slots]:
        slots, found = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64)
        count = self._library.lp_id_map_number(*self._of(keys), _address(slots), _address(found))
        return found[:count], slots

    def remove(self, keys: Keys, slots: Slots) -> None:
        self._library.lp_id_map_remove(*self._of(np.ascontiguousarray(keys)))

    def ticks(self) -> npt.NDArray[np.int64]:
        ticks = np.zeros(self._capacity, np.int64)
        self._library.lp_id_map_ticks(_address(self._entries), ctypes.c_int64(self._bits), _address(ticks))
        return ticks

    def reset_ticks(self) -> None:
        self._entries["tick"] = 0

    def clear(self) -> None:
        self._entries["slot"] = -1

    def _of(self, keys: Keys) -> tuple[ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64]:
        return _address(self._entries), ctypes.c_int64(self._bits), _address(keys), ctypes.c_int64(len(keys))


class _Dictionary(IdTable):
    def __init__(self, capacity: int) -> None:
        self._slots: dict[int, int] = {}
        self._ticks = np.zeros(capacity, np.int64)

    def find(self, keys: Keys) -> Slots:
        return np.fromiter(map(self._slots.get, keys.tolist(), repeat(-1)), np.int64, len(keys))

    def touch(self, keys: Keys, tick: int) -> tuple[Slots, Slots, Slots]:
        slots = self.find(keys)
        found, first = np.unique(slots, return_index=True)
        touched = slots[np.sort(first[found >= 0])]
        self._ticks[touched] = tick
        return slots, touched, np.flatnonzero(slots < 0)

    def insert(self, keys: Keys, slots: Slots, tick: int) -> None:
        self._slots.update(zip(keys.tolist(), slots.tolist(), strict=True))
        self._ticks[slots] = tick

    def remove(self, keys: Keys, slots: Slots) -> None:
        self._ticks[slots] = 0
        for key in keys.tolist():
            del self._slots[key]

    def ticks(self) -> npt.NDArray[np.int64]:
        return self._ticks.copy()

    def reset_ticks(self) -> None:
        self._ticks[:] = 0

    def clear(self) -> None:
        self._slots.clear()
        self._ticks[:] = 0


def _address(array: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
