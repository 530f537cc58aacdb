"""Store of rows in RocksDB, a log-structured merge tree, through the package rocksdict.

A version of the store is a RocksDB checkpoint; see ``versions``. Writes between commits go to memory and, in the
background, to new files, without a write-ahead log. They may be lost in a crash, but a commit writes no data twice. The
last record of a version is its number with the notes, so that a version without its last writes is found damaged.
RocksDB checks the sizes of its files when it opens them, and the checksum of each block that it reads.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rocksdict import (
    BlockBasedOptions,
    Cache,
    Checkpoint,
    DBCompressionType,
    Options,
    Rdict,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.store.record_bytes import (
    decode_keys,
    encode_keys,
    join_bytes_to_records,
    split_records_to_bytes,
)
from lightning_pipe.recsys.dynamic.store.row_store import Keys, RankStoreIdentity, Records, RowStore, StoreState
from lightning_pipe.recsys.dynamic.store.versions import VersionedFolder

# Minimum number of keys for which another reader thread pays off.
_KEYS_PER_READER = 256
# Seconds per record above which a reader counts as waiting for the disk, alone and as one of several. A read from
# memory takes 3 to 5 µs; several readers are then no faster, because they wait for the interpreter lock, and they take
# cores from training.
_WAITS_ALONE, _WAITS_AS_ONE_OF_SEVERAL = 10e-6, 40e-6
_MB = 1 << 20
# Key of a version's number and notes, after the keys of all tables.
_NOTES = b"\xff" * 16
# Maximum size of a scan's chunk, for any width of records.
_SCAN_BYTES = 4 * _MB


class RocksDbStore(RowStore):
    """:class:`~lightning_pipe.recsys.dynamic.store.row_store.RowStore` in RocksDB.

    Memory: twice ``write_buffer``, ``block_cache``, and about 1.5 bytes per record for filters and indexes.
    """

    def __init__(
        self,
        path: str | Path,
        widths: Mapping[str, int],
        description: Any = None,
        *,
        readers: int = 8,
        write_buffer: int = 64 * _MB,
        block_cache: int = 32 * _MB,
        direct_reads: bool = False,
    ) -> None:
        self._widths = dict(widths)
        self._numbers = {table: number for number, table in enumerate(sorted(widths))}
        described = {"widths": self._widths, "tables": description}
        self._folder = VersionedFolder(Path(path), described)
        self._notes: dict[str, str] = {}
        self._prepared_notes: dict[str, str] = {}
        self._options = _create_rocksdb_options(write_buffer, block_cache, direct_reads)
        self._unlogged = WriteOptions()
        self._unlogged.disable_wal = True  # type: ignore[method-assign, assignment]  # its stub is wrong
        self._open: Rdict | None = None
        self._readers = readers
        self._pool: ThreadPoolExecutor | None = None
        self._waits = True  # True if the last read waited for the disk

    @property
    def current_state(self) -> StoreState:
        return self._folder.state

    def write_identity(self, part: RankStoreIdentity) -> None:
        self._folder.write_identity(part)

    def recover(self, version: int) -> None:
        self._folder.recover(version)
        with self._engine_errors():
            self._open = Rdict(str(self._folder.working), self._options)
            if version > 0:
                last: Any = self._open.get(_NOTES)
                written, self._notes = (None, {}) if last is None else json.loads(last)
                if written != version:
                    raise self._folder.damaged_error(f"version {version} has the last writes of version {written}")
        if self._readers > 1:
            self._pool = ThreadPoolExecutor(self._readers, thread_name_prefix="lightning_pipe store")

    def read(self, table: str, keys: Keys) -> tuple[Records, npt.NDArray[np.bool_]]:
        width = self._widths[table]
        # Sorted, because neighboring keys are in the same block.
        order = np.argsort(keys)
        with self._engine_errors():
            values = self._get(encode_keys(self._numbers[table], keys[order]))
        records = np.empty((len(keys), width), np.uint8)
        present = np.ones(len(keys), np.bool_)
        if None in values:
            has_value = np.fromiter((value is not None for value in values), np.bool_, len(values))
            present[order] = has_value
            order = order[has_value]
            values = [value for value in values if value is not None]
        records[order] = self._join_records(values, width)
        return records, present

    def write(self, table: str, keys: Keys, records: Records) -> None:
        batch = WriteBatch(raw_mode=True)
        _exhaust_iterator(map(batch.put, encode_keys(self._numbers[table], keys), split_records_to_bytes(records)))
        self._write(batch)

    def erase(self, table: str, keys: Keys) -> None:
        batch = WriteBatch(raw_mode=True)
        _exhaust_iterator(map(batch.delete, encode_keys(self._numbers[table], keys)))
        self._write(batch)

    def prepare_commit(self, version: int, notes: Mapping[str, str] | None = None) -> None:
        database, notes = self._database, dict(notes or {})

        def write_rocksdb_checkpoint(folder: Path) -> None:
            batch = WriteBatch(raw_mode=True)
            batch.put(_NOTES, json.dumps([version, notes]).encode())
            self._write(batch)
            with self._engine_errors():
                database.flush()
                Checkpoint(database).create_checkpoint(str(folder))

        self._folder.prepare_commit(version, write_rocksdb_checkpoint)
        self._prepared_notes = notes

    def commit(self, version: int) -> None:
        self._folder.commit(version)
        self._notes = self._prepared_notes

    def notes(self) -> dict[str, str]:
        return dict(self._notes)

    def scan(self, table: str, chunk: int = 65536) -> Iterator[tuple[Keys, Records]]:
        width = self._widths[table]
        options = self._create_table_scan_options(table)
        last = _encode_lowest_table_key(self._numbers[table])
        items = self._database.items(from_key=last, read_opt=options)
        chunk = min(chunk, max(1, _SCAN_BYTES // width))

        def read_row_chunks(last: bytes) -> Iterator[tuple[Keys, Records]]:
            while part := list(islice(items, chunk)):
                keys, values = zip(*part, strict=True)
                last = keys[-1]
                joined = decode_keys(keys), self._join_records(values, width)
                del part, keys, values  # frees memory before the next chunk is read
                yield joined
                del joined
            self._check_scan_completed(options, last)

        return read_row_chunks(last)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        if self._open is not None:
            # Closing writes uncommitted data, which may be lost. An error, such as a full disk, does not matter.
            with suppress(Exception):
                self._open.close()
            self._open = None
        self._folder.close()

    # ------------------------------------------------------------------ helpers

    @property
    def _database(self) -> Rdict:
        if self._open is None:
            raise SetupError("the store of rows is closed or not recovered. Open it and call recover() first")
        return self._open

    def _get(self, keys: list[bytes]) -> list[bytes | None]:
        get: Callable[[Any], Any] = self._database.get  # releases the interpreter lock while it reads
        most = min(self._readers, len(keys) // _KEYS_PER_READER)
        readers = most if most > 1 and self._waits and self._pool is not None else 1
        begun = time.perf_counter()
        all_values: list[bytes | None]
        if readers == 1 or self._pool is None:
            all_values = get(keys) if keys else []
        else:
            size = -(-len(keys) // readers)
            parts = [keys[begin : begin + size] for begin in range(0, len(keys), size)]
            all_values = [value for values in self._pool.map(get, parts) for value in values]
        if len(keys) >= _KEYS_PER_READER:
            seconds_per_key = (time.perf_counter() - begun) * readers / len(keys)
            self._waits = seconds_per_key > (_WAITS_ALONE if readers == 1 else _WAITS_AS_ONE_OF_SEVERAL)
        return all_values

    def _write(self, batch: WriteBatch) -> None:
        with self._engine_errors():
            self._database.write(batch, self._unlogged)

    def _join_records(self, values: Any, width: int) -> Records:
        try:
            return join_bytes_to_records(values, width)
        except ValueError as error:
            raise self._folder.damaged_error(str(error)) from error

    def _create_table_scan_options(self, table: str) -> ReadOptions:
        options = ReadOptions()
        options.set_iterate_upper_bound(_encode_lowest_table_key(self._numbers[table] + 1))
        options.set_readahead_size(2 * _MB)
        return options

    def _check_scan_completed(self, options: ReadOptions, last: bytes) -> None:
        """Raise an error if a scan ended at a damaged block, where iterators end silently; another step shows it."""
        step = self._database.iter(options)
        step.seek(last)
        if step.valid():
            step.next()
        with self._engine_errors():
            step.status()

    @contextmanager
    def _engine_errors(self) -> Iterator[None]:
        """Convert RocksDB's errors, which are plain exceptions with a text."""
        try:
            yield
        except (SetupError, OSError):
            raise
        except Exception as error:
            text = str(error)
            if "orruption" in text or "No such file" in text:
                raise self._folder.damaged_error(text) from error
            if type(error) is Exception:
                raise self._folder.unwritable_error(text) from error
            raise


def _create_rocksdb_options(write_buffer: int, block_cache: int, direct_reads: bool) -> Options:
    blocks = BlockBasedOptions()
    blocks.set_block_cache(Cache(block_cache))
    # Looking up a key that does not exist then usually costs no read.
    blocks.set_bloom_filter(10, False)
    blocks.set_format_version(5)
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_block_based_table_factory(blocks)
    # Trained numbers hardly compress.
    options.set_compression_type(DBCompressionType.none())
    options.set_write_buffer_size(write_buffer)
    options.set_level_compaction_dynamic_level_bytes(True)
    options.set_max_background_jobs(2)
    options.set_max_open_files(512)
    options.set_keep_log_file_num(1)
    options.set_bytes_per_sync(_MB)
    options.set_advise_random_on_open(True)
    options.set_use_direct_reads(direct_reads)
    return options


def _encode_lowest_table_key(number: int) -> bytes:
    """Lower bound of the keys of the table with this number."""
    return number.to_bytes(2, "big") + bytes(8)


def _exhaust_iterator(calls: Iterator[Any]) -> None:
    """Run the calls of a ``map`` without a Python loop."""
    deque(calls, maxlen=0)
