"""Rows of a module as of one step, which all ranks commit and write to a checkpoint, also while training continues.

    training     dump ── copy ── step ── step ── step ─────────────────── copies changed rows, then holds evictions back
    background                   └─ commit ─────────── write(folder)
                                    changed rows,      all rows, as they were
                                    two phases         in the committed version

The two threads communicate over different process groups.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_pipe.engine.common.errors import InputError, SetupError
from lightning_pipe.engine.ranks.object_collectives import all_gather_objects, run_on_all_ranks
from lightning_pipe.recsys.dynamic.cache.row_cache import RowCache
from lightning_pipe.recsys.dynamic.store.buffered_store import Change, SharedStore
from lightning_pipe.recsys.dynamic.store.commit import commit_on_all_ranks
from lightning_pipe.recsys.dynamic.store.row_files import StoredRows, rows_folder, write_rows
from lightning_pipe.recsys.dynamic.store.row_store import Keys, Records
from lightning_pipe.recsys.dynamic.tables.id_mixing import unmix_ids

_FAILED = "rows cannot be read or written"
_SCANNED = 65_536  # rows of a file


class RowCommit:
    """One commit of a module's rows. All ranks create it, and call ``commit``, together."""

    def __init__(
        self,
        caches: Mapping[str, RowCache],
        store: SharedStore,
        group: dist.ProcessGroup,
        description: Mapping[str, Any],
        progress: Mapping[str, str],
        dumped: Callable[[bool], None],
    ) -> None:
        self._caches, self._store, self._dumped = caches, store, dumped
        self._group, self._progress = group, dict(progress)
        version = all_gather_objects(secrets.token_hex(8), group)[0]
        # Read together with the written rows.
        self.metadata: dict[str, Any] = {"version": version, "progress": self._progress, "tables": dict(description)}
        self._copies: list[tuple[RowCache, list[Change]]] | None = None
        self._scans: dict[str, Iterator[tuple[Keys, Records]]] = {}
        self._queued = False
        self._over = threading.Event()

    def copy_changes(self) -> None:
        """Copy changed rows, and hold evictions back until the copies are committed, so that training can continue."""
        # In this order: rows that are evicted in between have not changed since they were copied.
        self._copies = [(cache, cache.copy_changes()) for cache in self._caches.values()]
        self._store.buffer_writes()
        self._dumped(True)

    def commit(self, group: dist.ProcessGroup | None = None, *, to_write: bool = False) -> None:
        """Commit the rows on all ranks or on none. Collective."""
        if self._over.is_set():
            raise SetupError("a commit of rows was started after it had been given up. Save again")
        group, store = group or self._group, self._store.base
        notes = {"version": self.metadata["version"], **self._progress}
        try:
            run_on_all_ranks(self._write_changes, _FAILED, group, InputError)
            commit_on_all_ranks(store, group, notes)
            for cache in self._caches.values():
                cache.mark_stored()
            if to_write:
                self._scans = {table: store.scan(table, _SCANNED) for table in self._caches}
            if self._copies is None:
                self._dumped(True)
            else:
                run_on_all_ranks(self._store.flush_writes, _FAILED, group, InputError)
        except BaseException:
            # Evictions stay in memory until the next use of the rows, which writes them on all ranks together.
            self._scans = {}
            self._dumped(False)
            raise
        finally:
            self._copies = None
            self._over.set()

    def _write_changes(self) -> None:
        if self._copies is None:
            for cache in self._caches.values():
                cache.flush()
        else:
            for cache, changes in self._copies:
                while changes:
                    cache.write_changes(changes.pop())

    def write_files(self, folder: Path) -> None:
        """Write this rank's rows, as they were committed, to files."""
        while self._scans:
            table, scan = self._scans.popitem()
            chunks = (restore_original_row_ids(self._caches[table].decode(keys, records)) for keys, records in scan)
            write_rows(folder, table, self._group.rank(), self._group.size(), chunks)

    def mark_commit_queued(self) -> None:
        """Record that ``commit`` is going to be called on another thread."""
        self._queued = True

    def abandon(self) -> None:
        """Prevent the commit if it has not begun. Rows that were copied count as changed."""
        if not self._over.is_set():
            self._copies = None
            self._dumped(False)
            self._over.set()

    def wait_or_abandon(self) -> None:
        """Wait for the commit, or give it up if an error has prevented its start."""
        if not self._queued:
            self.abandon()
        self._over.wait()


class ModelRowCommit:
    """Commits of all modules of a model, by name, as a part of a checkpoint."""

    def __init__(self, dumps: Mapping[str, RowCommit]) -> None:
        self._dumps = dict(dumps)
        self.committed: dict[str, Any] = {name: dump.metadata for name, dump in dumps.items()}

    def copy_changes(self) -> None:
        """Copy changed rows, so that training can continue."""
        for dump in self._dumps.values():
            dump.copy_changes()

    def mark_commit_queued(self) -> None:
        """Record that ``commit`` is going to be called on another thread."""
        for dump in self._dumps.values():
            dump.mark_commit_queued()

    def commit(self, group: dist.ProcessGroup | None = None, *, to_write: bool = False) -> None:
        """Commit the rows; see :meth:`RowCommit.commit`. After an error, the commits of later modules are given up."""
        try:
            for dump in self._dumps.values():
                dump.commit(group, to_write=to_write)
        except BaseException:
            for dump in self._dumps.values():
                dump.abandon()
            raise

    def write_files(self, folder: Path) -> None:
        """Write this rank's rows, as they were committed, to a folder for each module."""
        for name, dump in self._dumps.items():
            dump.write_files(rows_folder(folder, name))


def restore_original_row_ids(rows: StoredRows) -> StoredRows:
    """Rows of a cache with their original ids instead of mixed ones."""
    return replace(rows, ids=unmix_ids(rows.ids))
