"""Commits of rows while training goes on: in whose order, and what an error leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_pipe.checkpoints.background_save import BackgroundSave
from lightning_pipe.engine import SetupError
from lightning_pipe.recsys.dynamic.store.buffered_store import SharedStore
from lightning_pipe.recsys.dynamic.store.rocksdb_store import RocksDbStore
from lightning_pipe.recsys.dynamic.store.row_files import read_rows
from tests.patience import HANG
from tests.recsys.dynamic.dynamic_cases import SGD, Model, rows_of, same, shard, train


@pytest.fixture
def saves(one_rank: None) -> Iterator[BackgroundSave]:
    saves = BackgroundSave()
    yield saves
    saves.close()


def reopened(folder: Path) -> Any:
    """Rows of the last commit."""
    return rows_of(shard(Model(folder / "rows", cache_rows=60, existing_rows="keep"), SGD))


def test_what_is_written_is_of_the_step_of_the_copy_whatever_is_trained_meanwhile(
    saves: BackgroundSave, tmp_path: Path
) -> None:
    sharded = shard(Model(tmp_path / "rows", cache_rows=60), SGD)
    train(sharded, range(3))
    before = rows_of(sharded)
    train(sharded, range(3, 5))
    at_copy = rows_of(sharded)
    dumped = sharded.prepare_row_dump()
    dumped.copy_changes()
    train(sharded, range(5, 12))
    dumped.commit(saves.group, to_write=True)
    dumped.write_files(tmp_path / "written")
    after = rows_of(sharded)
    assert not same(before, at_copy)
    assert not same(at_copy, after)
    other = shard(Model(tmp_path / "other", cache_rows=60), SGD)
    other.read_rows_from_folder(tmp_path / "written", dumped.committed, with_optimizers=True)
    assert same(rows_of(other), at_copy)
    sharded.close()
    assert same(reopened(tmp_path), at_copy)


def test_a_commit_that_never_began_is_given_up_by_the_next_use_of_the_rows(
    saves: BackgroundSave, tmp_path: Path
) -> None:
    sharded = shard(Model(tmp_path / "rows", cache_rows=60), SGD)
    train(sharded, range(2))
    given_up = sharded.prepare_row_dump()
    given_up.copy_changes()
    train(sharded, range(2, 9))
    expected = rows_of(sharded)
    with pytest.raises(SetupError, match="had been given up"):
        given_up.commit(saves.group)
    sharded.commit_rows()
    sharded.close()
    assert same(reopened(tmp_path), expected)


def _no_room(store: RocksDbStore, *args: Any) -> None:
    raise store._folder.unwritable_error("no room")


def _no_room_for_evictions(store: SharedStore) -> None:
    raise SetupError("no room")


@pytest.mark.parametrize(
    ("kind", "method", "fails"),
    [(RocksDbStore, "write", _no_room), (SharedStore, "_flush_chunk", _no_room_for_evictions)],
    ids=["changed rows", "evictions"],
)
def test_rows_that_a_commit_could_not_write_are_in_the_next_one(
    kind: type, method: str, fails: Any, saves: BackgroundSave, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded = shard(Model(tmp_path / "rows", cache_rows=60), SGD)
    train(sharded, range(2))
    dumped = sharded.prepare_row_dump()
    dumped.copy_changes()
    train(sharded, range(2, 9))
    assert any(rows._store.snapshot() for rows in sharded.dynamic_rows.values())  # evictions are held back
    with monkeypatch.context() as patched:
        patched.setattr(kind, method, fails)
        with pytest.raises(SetupError, match="no room"):
            dumped.commit(saves.group)
    train(sharded, range(9, 12))
    expected = rows_of(sharded)
    sharded.commit_rows()
    sharded.close()
    assert same(reopened(tmp_path), expected)


def test_an_export_beside_training_waits_for_the_commit(saves: BackgroundSave, tmp_path: Path) -> None:
    sharded = shard(Model(tmp_path / "rows", cache_rows=60, commit_every=2), SGD)
    goes_on = threading.Event()
    for rows in sharded.dynamic_rows.values():
        rows.saves = saves

    def wait() -> None:
        assert goes_on.wait(HANG)

    saves.add(wait)
    train(sharded, range(3))  # the second commit would wait for the first
    exporting = threading.Thread(target=sharded.write_rows_to_folder, args=(tmp_path / "written",))
    exporting.start()
    goes_on.set()
    exporting.join(HANG)
    saves.wait()
    written = {number for some in read_rows(tmp_path / "written", "people") for number in some.ids.tolist()}
    assert written == rows_of(sharded)["people"].keys()
