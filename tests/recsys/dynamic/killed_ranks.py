"""A training run of stores, on forked ranks, one of which is killed: at a line of the code, or at some time."""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch.distributed as dist

import lightning_pipe.recsys.dynamic
from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.dynamic.store.buffered_store import Change, SharedStore, TableStore
from lightning_pipe.recsys.dynamic.store.commit import commit_on_all_ranks, open_store_at_newest_version
from lightning_pipe.recsys.dynamic.store.rocksdb_store import RocksDbStore
from lightning_pipe.recsys.dynamic.store.row_store import Keys, Records, RowStore
from lightning_pipe.recsys.dynamic.tables.row_dump import RowCommit
from tests.patience import HANG
from tests.scenarios.faults.forked_ranks import Ended, Here

WIDTHS = {"items": 24, "users": 136}
_CODE = str(Path(lightning_pipe.recsys.dynamic.__file__).parent)

Rows = dict[str, dict[int, bytes]]


@dataclass(frozen=True)
class Kill:
    """When a rank is killed.

    Attributes:
        rank: which one.
        line: before the so-manieth line that it runs in the package's room of stores, or
        seconds: so long after it has begun.
    """

    rank: int
    line: int | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Seen:
    """What a rank's store has when it is opened."""

    version: int
    notes: dict[str, str]
    rows: Rows


def make(folder: Path, rank: int) -> RocksDbStore:
    """Small buffers, so that files are written and merged in the background all the time.

    How many lines are run depends on how fast the disk is nevertheless: see ``was_killed``. One reader, so that it does
    so little.
    """
    return RocksDbStore(folder / f"rank_{rank}", WIDTHS, {"dimension": 1}, write_buffer=1 << 16, readers=1)


def changes(version: int, rank: int) -> list[tuple[str, Keys, Records | None]]:
    """What a rank writes, and where there are no records erases, up to this version since the last."""
    found: list[tuple[str, Keys, Records | None]] = []
    rng = np.random.default_rng([version, rank])
    for table, width in WIDTHS.items():
        for _ in range(3):
            keys = np.unique(rng.integers(-600, 600, 400)) * 7_000_000_000_000_000
            found.append((table, keys, rng.integers(0, 256, (len(keys), width), dtype=np.uint8)))
        found.append((table, rng.permutation(keys)[:100], None))
    return found


def apply(store: RowStore | SharedStore, version: int, rank: int) -> None:
    shared = store if isinstance(store, SharedStore) else SharedStore(store)
    for table, keys, records in changes(version, rank):
        below = TableStore(shared, table)
        if records is None:
            below.erase(keys)
        else:
            below.write(keys, records)


def expected(version: int, rank: int) -> Rows:
    """The rows at a version."""
    rows: Rows = {table: {} for table in WIDTHS}
    for one in range(1, version + 1):
        for table, keys, records in changes(one, rank):
            for row, key in enumerate(keys.tolist()):
                if records is None:
                    rows[table].pop(key, None)
                else:
                    rows[table][key] = records[row].tobytes()
    return rows


def see(store: RowStore) -> Seen:
    rows = {
        table: {
            key: record.tobytes()
            for keys, records in store.scan(table, chunk=100)
            for key, record in zip(keys.tolist(), records, strict=True)
        }
        for table in WIDTHS
    }
    return Seen(store.current_state.committed, store.notes(), rows)


def train(here: Here, folder: str, versions: int, kill: Kill | None) -> int:
    """All ranks; returns how many lines this one took."""
    # What a rank does that waits for others to join is not of this package.
    group = join(here)
    with _killed(here.rank, kill) as counted:
        store = open_store_at_newest_version(lambda: make(Path(folder), here.rank), group)
        for version in range(store.current_state.committed + 1, versions + 1):
            apply(store, version, here.rank)
            commit_on_all_ranks(store, group, {"step": str(version)})
            _note(Path(folder), here.rank, f"committed {version}")
        apply(store, versions + 1, here.rank)
        store.close()
    return counted()


class _Cached:
    """What is left to write of a table when a commit begins, in place of a cache."""

    def __init__(self, shared: SharedStore, table: str, changes: list[Change]) -> None:
        self._below, self._changes = TableStore(shared, table), changes
        self.write_changes, self.mark_stored = self._below.write_changes, self._below.mark_stored

    def copy_changes(self) -> list[Change]:
        return self._changes


def _halves(shared: SharedStore, version: int, rank: int) -> dict[str, _Cached]:
    """Write the first changes of a version, as evictions do; the last ones of each table are left in caches."""
    found: dict[str, _Cached] = {}
    for table in WIDTHS:
        *early, last, erased = [(keys, records) for name, keys, records in changes(version, rank) if name == table]
        for keys, records in early:
            assert records is not None
            TableStore(shared, table).write(keys, records)
        keys, records = last
        assert records is not None
        there = ~np.isin(keys, erased[0])
        found[table] = _Cached(shared, table, [Change(keys[there], records[there], erased[0])])
    return found


def train_behind(here: Here, folder: str, versions: int, kill: Kill | None) -> int:
    """As ``train``, with commits in the background, while rows of the next version are evicted."""
    group = join(here)
    behind: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=HANG))
    with _killed(here.rank, kill) as counted, ThreadPoolExecutor(1) as pool:
        store = open_store_at_newest_version(lambda: make(Path(folder), here.rank), group)
        shared = SharedStore(store)
        pending: Future[None] | None = None
        for version in range(store.current_state.committed + 1, versions + 1):
            caches: Any = _halves(shared, version, here.rank)
            if pending is not None:
                pending.result()
                _note(Path(folder), here.rank, f"committed {version - 1}")
            dump = RowCommit(caches, shared, group, {}, {"step": str(version)}, lambda complete: None)
            dump.copy_changes()
            pending = pool.submit(dump.commit, behind)
        apply(shared, versions + 1, here.rank)
        if pending is not None:
            pending.result()
            _note(Path(folder), here.rank, f"committed {versions}")
        store.close()
    return counted()


def train_on_after_a_failed_commit(here: Here, folder: str) -> str:
    """The store of rank 1 cannot commit the first version, and can the second; returns the first one's error."""
    group = join(here)
    store: Any = open_store_at_newest_version(lambda: make(Path(folder), here.rank), group)
    commit, message = store.commit, ""

    def fails(version: int) -> None:
        store.commit = commit
        raise OSError("no room")

    if here.rank == 1:
        store.commit = fails
    for version in (1, 2):
        apply(store, version, here.rank)
        try:
            commit_on_all_ranks(store, group, {"step": str(version)})
        except SetupError as error:
            message = str(error)
    _note(Path(folder), here.rank, "committed 2")
    store.close()
    return message


def look(here: Here, folder: str) -> Seen:
    """Opens the stores of all ranks and says what is in this rank's."""
    group = join(here)
    store = open_store_at_newest_version(lambda: make(Path(folder), here.rank), group)
    seen = see(store)
    store.close()
    return seen


def join(here: Here) -> dist.ProcessGroup:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{here.folder}/group",
        rank=here.rank,
        world_size=here.world_size,
        timeout=timedelta(seconds=HANG),
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def noted(folder: Path, rank: int) -> list[str]:
    """What a rank has said that it did, before it was killed."""
    path = folder / f"noted_{rank}"
    return path.read_text().splitlines() if path.exists() else []


def _note(folder: Path, rank: int, text: str) -> None:
    with (folder / f"noted_{rank}").open("a") as file:
        file.write(f"{text}\n")


class _killed:
    """While it lasts, the process is killed when its time has come."""

    def __init__(self, rank: int, kill: Kill | None) -> None:
        mine = kill if kill is not None and kill.rank == rank else None
        self._line = None if mine is None else mine.line
        self._seconds = None if mine is None else mine.seconds
        self._count = 0

    def __enter__(self) -> Callable[[], int]:
        if self._seconds is not None:
            _kill_after(self._seconds)
        else:
            sys.settrace(self._enter)
            threading.settrace(self._enter)
        return lambda: self._count

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        # Not the many steps of comprehensions.
        code = frame.f_code
        return self._step if code.co_filename.startswith(_CODE) and not code.co_name.startswith("<") else None

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._count += 1
            if self._count == self._line:
                os.kill(os.getpid(), signal.SIGKILL)
        return self._step


def _kill_after(seconds: float) -> None:
    """Another process does it: also while this one is inside a call."""
    target = os.getpid()
    if os.fork() == 0:
        select.select([], [], [], seconds)
        os.kill(target, signal.SIGKILL)
        os._exit(0)


def was_killed(ended: Ended, line: int) -> bool:
    """Whether it was killed at *line*; where it was not, it must have ended well before it came to that many lines.

    A store lists its files, and RocksDB merges them when it likes: no two runs have the same number of lines.
    """
    if ended.code == -signal.SIGKILL:
        return True
    assert ended.code == 0, ended
    assert ended.value < line, ended
    return False


def moments(seed: int, count: int, longest: float) -> list[float]:
    """Times to kill at, seconds."""
    drawn = random.Random(seed)
    return [drawn.uniform(0.0, longest) for _ in range(count)]
