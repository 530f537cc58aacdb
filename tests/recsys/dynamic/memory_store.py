"""A store of rows in memory, for tests of what uses one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from lightning_pipe.recsys.dynamic.store.row_store import Keys, RankStoreIdentity, Records, RowStore, StoreState


class MemoryStore(RowStore):
    """Records in dictionaries. It sees to it that one thread at a time calls it.

    Attributes:
        widths: number of bytes of a record, by table.
        tables: records by table and key.
        failing: methods that raise, by name.
    """

    def __init__(self, widths: Mapping[str, int]) -> None:
        self.widths = dict(widths)
        self.tables: dict[str, dict[int, bytes]] = {table: {} for table in widths}
        self.failing: set[str] = set()
        self._busy = threading.Lock()

    @property
    def current_state(self) -> StoreState:
        return StoreState(0, None)

    def write_identity(self, part: RankStoreIdentity) -> None:
        raise NotImplementedError

    def recover(self, version: int) -> None:
        raise NotImplementedError

    def prepare_commit(self, version: int, notes: Mapping[str, str] | None = None) -> None:
        raise NotImplementedError

    def commit(self, version: int) -> None:
        raise NotImplementedError

    def notes(self) -> dict[str, str]:
        return {}

    def read(self, table: str, keys: Keys) -> tuple[Records, npt.NDArray[np.bool_]]:
        with self._called("read", keys):
            held = self.tables[table]
            found = np.array([key in held for key in keys.tolist()], bool)
            blank = b"\xff" * self.widths[table]
            records = b"".join(held.get(key, blank) for key in keys.tolist())
            # Read-only, as what is mapped from a file.
            return np.frombuffer(records, np.uint8).reshape(len(keys), self.widths[table]), found

    def write(self, table: str, keys: Keys, records: Records) -> None:
        with self._called("write", keys):
            assert records.shape == (len(keys), self.widths[table])
            self.tables[table].update(
                (key, record.tobytes()) for key, record in zip(keys.tolist(), records, strict=True)
            )

    def erase(self, table: str, keys: Keys) -> None:
        with self._called("erase", keys):
            for key in keys.tolist():
                self.tables[table].pop(key, None)

    def scan(self, table: str, chunk: int = 65536) -> Iterator[tuple[Keys, Records]]:
        order = sorted(self.tables[table])
        keys = np.array(order, np.int64)
        records = self.read(table, keys)[0]
        return ((keys[at : at + chunk], records[at : at + chunk]) for at in range(0, len(order), chunk))

    def close(self) -> None:
        pass

    def _called(self, method: str, keys: Keys) -> threading.Lock:
        assert keys.dtype == np.int64
        assert len(np.unique(keys)) == len(keys)
        assert not self._busy.locked()
        if method in self.failing:
            raise OSError(f"{method} fails")
        return self._busy
