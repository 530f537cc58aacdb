"""Interface of a store of rows on disk: records by key, and recovery of the state at a commit.

    evictions ──► overlay (may be lost) ──┐
    dirty rows of the cache at a commit ──┴─► prepare(v) ──► all ranks have ──► commit(v): the new base,
                                              durable, v - 1 still exists       recovery rolls forward to it

A rank that is killed before it has prepared version *v* opens at *v* - 1. So must all others, and they can, because a
rank commits only after all ranks have prepared. If a rank has committed *v*, all others have at least prepared *v* and
can roll forward. All ranks therefore open at the newest version that any rank has committed (two-phase commit; Gray,
"Notes on Data Base Operating Systems", 1978).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.int64]
Records = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RankStoreIdentity:
    """Identity of a rank's store within a run. Only stores of the same run can be opened together."""

    run: str  # random name, drawn when the stores of all ranks were new
    rank: int
    ranks: int


@dataclass(frozen=True)
class StoreState:
    """State of a rank's store."""

    committed: int  # newest version that this rank has committed; 0 before the first commit
    prepared: int | None  # version that is prepared and not committed
    part: RankStoreIdentity | None = None  # last argument of ``write_identity``


class RowStore(ABC):
    """One rank's records of all tables.

    Each table has records of a fixed number of bytes. Keys are any int64, without duplicates in a call. Reads return
    the last write, committed or not. Stores are not thread-safe, with two exceptions: ``prepare_commit`` and
    ``commit`` may run beside reads, and a scan beside all other calls except ``close``.
    """

    @property
    @abstractmethod
    def current_state(self) -> StoreState:
        """Current state of the store."""

    @abstractmethod
    def write_identity(self, part: RankStoreIdentity) -> None:
        """Make the store *part* of a run, durably. May be called before ``recover``."""

    @abstractmethod
    def recover(self, version: int) -> None:
        """Restore *version*, on which all ranks agree, without later writes. Required before reads and writes."""

    @abstractmethod
    def read(self, table: str, keys: Keys) -> tuple[Records, npt.NDArray[np.bool_]]:
        """Read the records of *keys*."""

    @abstractmethod
    def write(self, table: str, keys: Keys, records: Records) -> None:
        """Write records. Later reads return them, and the next commit includes them; an earlier crash may lose them."""

    @abstractmethod
    def erase(self, table: str, keys: Keys) -> None:
        """Erase records, with the same durability as ``write``. Missing keys are ignored."""

    @abstractmethod
    def prepare_commit(self, version: int, notes: Mapping[str, str] | None = None) -> None:
        """Make all writes so far durable as *version*, which can then be committed or discarded.

        A second call, after the first failed on some rank, replaces the first.
        """

    @abstractmethod
    def commit(self, version: int) -> None:
        """Make the prepared version the current one, durably."""

    @abstractmethod
    def notes(self) -> dict[str, str]:
        """Notes of the committed version."""

    @abstractmethod
    def scan(self, table: str, chunk: int = 65536) -> Iterator[tuple[Keys, Records]]:
        """Yield all records of a table in a fixed order, such as that of the keys, at most *chunk* at a time.

        The scan sees the records that existed at the call, independent of later writes and erasures.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the folder without a commit. A second call has no effect."""
