"""Rows of a cache's table with their headers and values.

Tested in ``tests/recsys/dynamic/cache/test_row_cache.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lightning_pipe.recsys.dynamic.cache.row_columns import RowColumns
from lightning_pipe.recsys.dynamic.cache.row_headers import BYTES
from lightning_pipe.recsys.dynamic.store.row_store import Keys, Records

__all__ = ["CachedRows", "headers_of"]


@dataclass(frozen=True)
class CachedRows:
    """Chunk of a table's rows.

    Attributes:
        keys: ids of the rows.
        counts: number of trained batches in which each row has occurred.
        last_seen: step of the last such batch.
        columns: weights and optimiser states, in the order of the table's columns.
    """

    keys: Keys
    counts: npt.NDArray[np.int64]
    last_seen: npt.NDArray[np.int64]
    columns: list[Tensor]

    @classmethod
    def of(cls, keys: Keys, records: Records, columns: RowColumns) -> CachedRows:
        """Decode records of a table with these columns."""
        counts, last_seen = headers_of(records).T
        return cls(keys, counts, last_seen, columns.typed(records[:, BYTES:]))


def headers_of(records: Records) -> npt.NDArray[np.int64]:
    """Count and last step of each record: [records, 2]."""
    return np.array(records[:, :BYTES], order="C").view(np.int64)
