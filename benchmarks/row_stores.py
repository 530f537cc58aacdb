"""Cost of a row store for its cache: the project's RocksDB store against a minimal use of LMDB.

``python -m benchmarks.row_stores`` loads the given number of records into each store, and then issues the operations of
a cache for a twentieth of them: it reads batches of ids from a Zipf distribution without the cached ones, writes the
same number of records back, and commits from time to time. It prints medians over rounds, with minimum and maximum, of

- hot reads, with the files in the system's page cache, and cold reads, after the store was closed and the files were
  dropped from the page cache (``posix_fadvise``, the most that is possible without control of the machine);
- writes, commits, a scan, and the size on disk;
- the same reads and writes concurrent with a computing thread, with many small or with large kernels, and the slowdown
  of that thread.

The stores alternate in each round. LMDB does less: its transaction is the overlay, its commit has one phase instead of
two, and its pages have no checksums.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import lmdb
import numpy as np
import torch

from lightning_pipe.recsys.dynamic.store.record_bytes import (
    decode_keys,
    encode_keys,
    join_bytes_to_records,
    split_records_to_bytes,
)
from lightning_pipe.recsys.dynamic.store.rocksdb_store import RocksDbStore
from lightning_pipe.recsys.dynamic.store.row_store import Keys, Records

TABLE = "rows"
Figures = dict[tuple[str, str], list[float]]


class Contender(Protocol):
    def read(self, keys: Keys) -> Records: ...
    def write(self, keys: Keys, records: Records) -> None: ...
    def commit(self) -> None: ...
    def scan(self) -> Iterator[tuple[Keys, Records]]: ...
    def close(self) -> None: ...


class Rocks:
    """The project's store."""

    def __init__(self, folder: Path, width: int, **options: Any) -> None:
        self._store = RocksDbStore(folder, {TABLE: width}, **options)
        self._store.recover(self._store.current_state.committed)

    def read(self, keys: Keys) -> Records:
        records, present = self._store.read(TABLE, keys)
        assert present.all()
        return records

    def write(self, keys: Keys, records: Records) -> None:
        self._store.write(TABLE, keys, records)

    def commit(self) -> None:
        version = self._store.current_state.committed + 1
        self._store.prepare_commit(version)
        self._store.commit(version)

    def scan(self) -> Iterator[tuple[Keys, Records]]:
        return self._store.scan(TABLE)

    def close(self) -> None:
        self._store.close()


class Lmdb:
    """LMDB with one transaction from commit to commit, batched calls and sorted keys."""

    def __init__(self, folder: Path, width: int) -> None:
        self._width = width
        folder.mkdir(exist_ok=True)
        self._environment = lmdb.open(str(folder), map_size=1 << 36, readahead=False)
        self._begin()

    def _begin(self) -> None:
        self._transaction = self._environment.begin(write=True)
        self._cursor = self._transaction.cursor()

    def read(self, keys: Keys) -> Records:
        order = np.argsort(keys)
        pairs = self._cursor.getmulti(encode_keys(0, keys[order]))
        records = np.empty((len(keys), self._width), np.uint8)
        records[order] = join_bytes_to_records([value for _, value in pairs], self._width)
        return records

    def write(self, keys: Keys, records: Records) -> None:
        order = np.argsort(keys)
        pairs = zip(encode_keys(0, keys[order]), split_records_to_bytes(records[order]), strict=True)
        self._cursor.putmulti(list(pairs), dupdata=False)

    def commit(self) -> None:
        self._transaction.commit()
        self._begin()

    def scan(self) -> Iterator[tuple[Keys, Records]]:
        self._cursor.first()
        pairs = self._cursor.iternext()
        while part := [pair for _, pair in zip(range(65536), pairs, strict=False)]:
            yield (
                decode_keys([key for key, _ in part]),
                join_bytes_to_records([value for _, value in part], self._width),
            )

    def close(self) -> None:
        self._transaction.abort()
        self._environment.close()


class Workload:
    """Random ids that miss a cache of the most frequent ids."""

    def __init__(self, records: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._ids = self._rng.permutation(records).astype(np.int64) * 1_000_003 - 2**40
        share = 1.0 / np.arange(1, records + 1) ** 1.05
        share[: records // 20] = 0.0
        self._sums = np.cumsum(share / share.sum())

    @property
    def all(self) -> Keys:
        return self._ids

    def misses(self, count: int) -> Keys:
        """*count* distinct ids that miss the cache."""
        missing = np.empty(0, np.int64)
        while len(missing) < count:
            drawn = np.searchsorted(self._sums, self._rng.random(2 * count)).clip(max=len(self._ids) - 1)
            missing = np.unique(np.concatenate([missing, drawn]))
        return self._ids[self._rng.permutation(missing)[:count]]

    def records(self, count: int, width: int) -> Records:
        return self._rng.integers(0, 256, (count, width), dtype=np.uint8)


def drop(folder: Path) -> None:
    """Drop the files of *folder* from the system's page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def size_on_disk(folder: Path) -> int:
    """Size of the files in bytes, in which hard links to the same file count once."""
    size_by_inode = {file.stat().st_ino: file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file()}
    return sum(size_by_inode.values())


def beside(body: Callable[[], None], size: int, seconds: float) -> tuple[float, float]:
    """Run *body* repeatedly, concurrent with a thread that multiplies matrices of that size.

    Returns:
        The thread's multiplications per second, and the seconds per call of *body*.
    """
    matrix = torch.ones(size, size) / size
    done, end = 0, threading.Event()

    def compute() -> None:
        nonlocal done
        value = matrix
        while not end.is_set():
            value = value @ matrix
            done += 1

    thread = threading.Thread(target=compute)
    begun = time.perf_counter()
    thread.start()
    times = 0
    while time.perf_counter() - begun < seconds:
        body()
        times += 1
    elapsed = time.perf_counter() - begun
    end.set()
    thread.join()
    return max(done, 1) / elapsed, elapsed / max(times, 1)


def timed(body: Callable[..., object], *args: Any) -> float:
    begun = time.perf_counter()
    body(*args)
    return time.perf_counter() - begun


def one_round(
    name: str, make: Callable[[], Contender], folder: Path, work: Workload, options: argparse.Namespace, into: Figures
) -> None:
    """Measure all figures of one store once."""

    def add(metric: str, value: float) -> None:
        into[metric, name].append(value)

    for batch in options.batches:
        drop(folder)  # the store was closed after the last measurement
        contender = make()
        keys = work.misses(batch)
        add(f"read cold, {batch} keys, ns a record", timed(contender.read, keys) / batch * 1e9)
        add(f"read hot, {batch} keys, ns a record", timed(contender.read, keys) / batch * 1e9)
        for _ in range(options.commit_every):
            keys, records = work.misses(batch), work.records(batch, options.width)
            contender.read(keys)
            add(f"write, {batch} keys, ns a record", timed(contender.write, keys, records) / batch * 1e9)
        add(f"commit after {options.commit_every} batches of {batch}, ms", timed(contender.commit) * 1e3)
        contender.close()
    contender = make()
    add("scan, ns a record", timed(lambda: sum(len(keys) for keys, _ in contender.scan())) / options.records * 1e9)
    keys, records = work.misses(options.batches[-1]), work.records(options.batches[-1], options.width)

    def read_and_write() -> None:
        contender.read(keys)
        contender.write(keys, records)

    for size in (32, 512):
        alone, _ = beside(lambda: time.sleep(0.05), size, options.seconds)
        store_alone = statistics.median(timed(read_and_write) for _ in range(5))
        together, store_together = beside(read_and_write, size, options.seconds)
        add(f"with {size} x {size} products: speed of the thread / alone", together / alone)
        add(f"with {size} x {size} products: time of the store / alone", store_together / store_alone)
    contender.commit()
    contender.close()
    add("size on disk, MB", size_on_disk(folder) / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--width", type=int, default=136, help="bytes per record")
    parser.add_argument("--batches", type=int, nargs="+", default=[1000, 5000, 20000], help="keys per batch")
    parser.add_argument("--commit-every", type=int, default=4, help="batches per commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement with a computing thread")
    parser.add_argument("--folder", type=Path, default=None, help="folder on the disk to measure (default: temporary)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(dir=options.folder))
    makers: dict[str, Callable[[], Contender]] = {
        "rocksdb": lambda: Rocks(root / "rocksdb", options.width),
        "rocksdb, 1 reader": lambda: Rocks(root / "rocksdb, 1 reader", options.width, readers=1),
        "lmdb": lambda: Lmdb(root / "lmdb", options.width),
    }
    figures: Figures = defaultdict(list)
    work = Workload(options.records, seed=0)
    try:
        for name, make in makers.items():
            figures["load, ns a record", name] = [timed(load, make, work, options) / options.records * 1e9]
        for _ in range(options.rounds):
            for name, make in makers.items():
                one_round(name, make, root / name, work, options, figures)
    finally:
        shutil.rmtree(root)
        show(figures, list(makers))  # also after an interrupt


def load(make: Callable[[], Contender], work: Workload, options: argparse.Namespace) -> None:
    """Load all records in one commit."""
    contender = make()
    for begin in range(0, options.records, 20000):
        keys = work.all[begin : begin + 20000]
        contender.write(keys, work.records(len(keys), options.width))
    contender.commit()
    contender.close()


def show(figures: Figures, names: list[str]) -> None:
    metrics = list(dict.fromkeys(label for label, _ in figures))
    print(f"{'':<66}" + "".join(f"{name:>28}" for name in names))
    for metric in metrics:
        cells = []
        for name in names:
            values = figures.get((metric, name), [float("nan")])
            digits = 2 if max(values) < 10 else 0
            least, middle, most = min(values), statistics.median(values), max(values)
            cells.append(f"{middle:.{digits}f} ({least:.{digits}f}-{most:.{digits}f})")
        print(f"{metric:<66}" + "".join(f"{cell:>28}" for cell in cells))


if __name__ == "__main__":
    main()
