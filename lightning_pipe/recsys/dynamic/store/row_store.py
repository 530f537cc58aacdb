"""What a store of rows on disk must be able to do: hold records by key, and come back as it was at a commit.

    evictions ──► overlay (may be lost) ──┐
    dirty rows of the cache at a commit ──┴─► prepare(v) ──► all ranks have ──► commit(v): the new base
                                              durable, v - 1 still there        rolls forward from then on

A rank that is killed before it has prepared version *v* opens at *v* - 1, and so must the others: they can, since they
commit only when all have prepared. A rank that has committed *v* knows that all others have at least prepared it, and
can roll forward. So the version that all open at is the newest that any rank has committed (two-phase commit; Gray,
"Notes on Data Base Operating Systems", 1978).

Tested in ``tests/scenarios/recommenders/test_store_kills.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Keys", "Records", "RowStore", "RunPart", "StoreState"]

Keys = npt.NDArray[np.int64]
Records = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RunPart:
    """Whose part of a table's rows a store has; those of a run fit together.

    Attributes:
        run: drawn at random when the stores of all ranks were new.
        rank: whose store it is.
        ranks: how many there are.
    """

    run: str
    rank: int
    ranks: int


@dataclass(frozen=True)
class StoreState:
    """What a rank finds when it opens its store.

    Attributes:
        committed: the newest version that this rank has committed; 0 before the first.
        prepared: the version that is prepared and not committed, None where there is none.
        part: what was last told to ``join``, None before.
    """

    committed: int
    prepared: int | None
    part: RunPart | None = None


class RowStore(ABC):
    """One rank's records of all its tables.

    A record is a fixed number of bytes by table. Keys are any int64, each at most once in a call. One thread at a time;
    the caller sees to that. Reads see what was written last, committed or not.

    Args:
        path: the rank's own folder; made where it is not there.
        widths: bytes of a record, by table.
        description: anything in plain types (YAML's) that must be the same whenever the store is opened, such as
            columns and optimiser of each table; a difference is refused.

    Raises:
        SetupError: the folder holds a store of another description, one that is damaged or in use, or cannot be
            written.
    """

    @property
    @abstractmethod
    def state(self) -> StoreState:
        """What was found at opening, or has become of it since."""

    @abstractmethod
    def join(self, part: RunPart) -> None:
        """Be *part* of a run from now on, also after a crash. May come before ``settle``."""

    @abstractmethod
    def settle(self, version: int) -> None:
        """Before anything else: be as at *version*, which all ranks have agreed on; forget everything after it.

        Raises:
            SetupError: that version is neither the committed nor the prepared one.
        """

    @abstractmethod
    def read(self, table: str, keys: Keys) -> tuple[Records, npt.NDArray[np.bool_]]:
        """Records of *keys*.

        Returns:
            bytes, keys x width, undefined where there is none; and which were found.
        """

    @abstractmethod
    def write(self, table: str, keys: Keys, records: Records) -> None:
        """Keep records, to be read from now on, and to be part of the next commit. May be lost until then.

        Raises:
            SetupError: the disk is full or the store cannot be written; what was committed is whole.
        """

    @abstractmethod
    def erase(self, table: str, keys: Keys) -> None:
        """Forget keys, as ``write`` keeps records. Keys that are not there are none of its concern."""

    @abstractmethod
    def prepare(self, version: int, notes: Mapping[str, str] | None = None) -> None:
        """Make everything written so far durable, to become *version* (committed + 1) or to be forgotten.

        A second call, after the first has failed on some rank, takes its place.

        Args:
            notes: texts that belong to the version, for ``notes``.

        Raises:
            SetupError: as of ``write``.
        """

    @abstractmethod
    def commit(self, version: int) -> None:
        """The prepared version is the present one from now on, also after a crash."""

    @abstractmethod
    def notes(self) -> dict[str, str]:
        """Those of the committed version."""

    @abstractmethod
    def scan(self, table: str, chunk: int = 65536) -> Iterator[tuple[Keys, Records]]:
        """All records of a table, in the order of keys or any other fixed one, at most *chunk* at a time.

        They are those at its beginning, whatever is written or erased meanwhile.
        """

    @abstractmethod
    def count(self, table: str) -> int:
        """How many records a table has. May cost a scan of the keys."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the folder, without a commit. A second call does nothing."""
