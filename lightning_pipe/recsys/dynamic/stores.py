"""The stores that there are, by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_pipe.engine.errors import SetupError
from lightning_pipe.recsys.dynamic.row_store import RowStore

__all__ = ["STORES", "open_store"]

STORES = ("rocksdb",)


def open_store(kind: str | None, path: Path, *, widths: Mapping[str, int], description: Any) -> RowStore:
    """A rank's store, not settled yet.

    Args:
        kind: one of :data:`STORES`; None for the first.
        path: the rank's folder.
        widths: see :class:`~lightning_pipe.recsys.dynamic.row_store.RowStore`.
        description: see there.

    Raises:
        SetupError: another kind, or one whose package is missing; and what the store raises.
    """
    if kind not in (None, *STORES):
        raise SetupError(f"store_kind is {kind!r}; needed is one of {', '.join(STORES)}, or None for the first")
    try:
        from lightning_pipe.recsys.dynamic.rocksdb_store import RocksDbStore
    except ImportError as error:
        raise SetupError(
            f"dynamic tables keep their rows in RocksDB, whose package cannot be imported: {error}; install"
            " lightning-pipe[dynamic]"
        ) from error
    return RocksDbStore(path, widths, description)
