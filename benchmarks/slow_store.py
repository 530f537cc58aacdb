"""A store with slow reads, as on a slower disk, to measure how well they are overlapped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from lightning_pipe.recsys.dynamic.store.row_store import Keys, RankStoreIdentity, Records, RowStore, StoreState

__all__ = ["SlowStore"]


class SlowStore(RowStore):
    """Wraps a store and waits before each read, without holding the interpreter lock.

    Args:
        store: wrapped store.
        per_read: seconds to wait for each read, regardless of the number of keys (default 0).
        per_record: seconds to wait for each key (default 0).
        wait: function that waits for a number of seconds (default ``time.sleep``).
    """

    def __init__(
        self,
        store: RowStore,
        per_read: float = 0.0,
        per_record: float = 0.0,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._per_read, self._per_record = per_read, per_record
        self._wait = wait

    @property
    def current_state(self) -> StoreState:
        return self._store.current_state

    def write_identity(self, part: RankStoreIdentity) -> None:
        self._store.write_identity(part)

    def recover(self, version: int) -> None:
        self._store.recover(version)

    def read(self, table: str, keys: Keys) -> tuple[Records, npt.NDArray[np.bool_]]:
        if len(keys):
            self._wait(self._per_read + self._per_record * len(keys))
        return self._store.read(table, keys)

    def write(self, table: str, keys: Keys, records: Records) -> None:
        self._store.write(table, keys, records)

    def erase(self, table: str, keys: Keys) -> None:
        self._store.erase(table, keys)

    def prepare_commit(self, version: int, notes: Mapping[str, str] | None = None) -> None:
        self._store.prepare_commit(version, notes)

    def commit(self, version: int) -> None:
        self._store.commit(version)

    def notes(self) -> dict[str, str]:
        return self._store.notes()

    def scan(self, table: str, chunk: int = 65536) -> Iterator[tuple[Keys, Records]]:
        return self._store.scan(table, chunk)

    def close(self) -> None:
        self._store.close()
