"""A store of rows: what it keeps, what it forgets, and what it refuses."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.store import rocksdb_store
from lightning_pipe.recsys.dynamic.store.rocksdb_store import RocksDbStore
from lightning_pipe.recsys.dynamic.store.row_store import Keys, RankStoreIdentity, StoreState
from tests.recsys.dynamic.small_stores import EDGES, WIDTH, commit, open_store, size, some_records
from tests.scenarios.faults.forked_ranks import Here, Nursery, told


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "rank_0"


@pytest.fixture
def store(folder: Path) -> Iterator[RocksDbStore]:
    store = open_store(folder)
    yield store
    store.close()


# ---------------------------------------------------------------------- records


def test_reads_see_what_was_written_last_for_any_key(store: RocksDbStore) -> None:
    store.write("a", EDGES, some_records(len(EDGES), seed=1))
    store.write("a", EDGES[::2], some_records(len(EDGES[::2]), seed=2))
    keys = np.random.default_rng(0).permutation(EDGES)
    records, found = store.read("a", keys)
    assert found.all()
    wanted = some_records(len(EDGES), seed=1)
    wanted[::2] = some_records(len(EDGES[::2]), seed=2)
    np.testing.assert_array_equal(records[np.argsort(keys)], wanted[np.argsort(EDGES)])


def test_keys_that_are_not_there_are_told_from_those_that_are(store: RocksDbStore) -> None:
    store.write("a", EDGES[:5], some_records(5))
    store.erase("a", EDGES[1:2])
    store.erase("a", np.array([77]))
    records, found = store.read("a", EDGES)
    assert found.tolist() == [True, False, True, True, True] + [False] * 5
    np.testing.assert_array_equal(records[found], some_records(5)[[0, 2, 3, 4]])


@pytest.mark.parametrize("waits", [0.0, 1e9], ids=["as if from a disk", "as if from memory"])
@pytest.mark.parametrize("readers", [1, 8])
def test_large_reads_are_in_order_whoever_shares_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, readers: int, waits: float
) -> None:
    monkeypatch.setattr(rocksdb_store, "_WAITS_ALONE", waits)
    monkeypatch.setattr(rocksdb_store, "_WAITS_AS_ONE_OF_SEVERAL", waits)
    store = open_store(folder, readers=readers, write_buffer=1 << 16)
    keys = np.random.default_rng(3).permutation(np.arange(-4000, 4000)) * 10**15
    store.write("a", keys, some_records(len(keys)))
    for _ in range(2):
        records, found = store.read("a", keys)
        assert found.all()
        np.testing.assert_array_equal(records, some_records(len(keys)))
    store.close()


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_a_scan_gives_each_record_once_in_the_order_of_keys(store: RocksDbStore, chunk: int) -> None:
    store.write("a", EDGES, some_records(len(EDGES)))
    store.write("b", EDGES, some_records(len(EDGES), width=8))
    parts = list(store.scan("a", chunk))
    assert max(len(keys) for keys, _ in parts) == min(chunk, len(EDGES))
    order = np.argsort(EDGES)
    np.testing.assert_array_equal(np.concatenate([keys for keys, _ in parts]), EDGES[order])
    np.testing.assert_array_equal(np.concatenate([records for _, records in parts]), some_records(len(EDGES))[order])


# ---------------------------------------------------------------------- versions


def test_direct_reads_see_what_was_committed(folder: Path) -> None:
    records = some_records(len(EDGES))
    with closing(open_store(folder)) as store:
        store.write("a", EDGES, records)
        commit(store)
    with closing(open_store(folder, direct_reads=True)) as store:
        read, found = store.read("a", EDGES)
    assert found.all()
    np.testing.assert_array_equal(read, records)


def test_a_commit_survives_and_what_came_after_it_does_not(folder: Path) -> None:
    store = open_store(folder)
    store.write("a", EDGES, some_records(len(EDGES)))
    commit(store, step="7")
    store.write("a", EDGES, some_records(len(EDGES), seed=1))
    store.write("a", np.array([5]), some_records(1))
    store.erase("a", EDGES[:3])
    store.close()
    store = open_store(folder)
    assert store.current_state == StoreState(1, None)
    assert store.notes() == {"step": "7"}
    records, found = store.read("a", np.append(EDGES, 5))
    assert found.tolist() == [True] * len(EDGES) + [False]
    np.testing.assert_array_equal(records[:-1], some_records(len(EDGES)))
    store.close()


def test_a_link_in_place_of_the_working_copy_is_removed_and_not_followed(folder: Path, tmp_path: Path) -> None:
    store = open_store(folder)
    store.write("a", EDGES, some_records(len(EDGES)))
    commit(store)
    store.close()
    shutil.rmtree(folder / "working")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    (folder / "working").symlink_to(tmp_path / "other")
    store = open_store(folder)
    np.testing.assert_array_equal(store.read("a", EDGES)[0], some_records(len(EDGES)))
    store.close()
    assert (tmp_path / "other" / "file").exists()
    assert not (folder / "working").is_symlink()


@pytest.mark.parametrize("forward", [False, True])
def test_a_prepared_version_is_taken_or_forgotten_as_asked(folder: Path, forward: bool) -> None:
    store = open_store(folder)
    store.write("a", EDGES[:2], some_records(2))
    commit(store, step="1")
    store.write("a", EDGES[2:3], some_records(1))
    store.prepare_commit(2, {"step": "2"})
    store.close()
    store = RocksDbStore(folder, {"a": WIDTH, "b": 8}, {"a": {"dimension": 9}})
    assert store.current_state == StoreState(1, 2)
    store.recover(2 if forward else 1)
    assert store.current_state == StoreState(2 if forward else 1, None)
    assert store.notes() == {"step": "2" if forward else "1"}
    assert size(store, "a") == (3 if forward else 2)
    commit(store)
    store.close()
    assert _folders(folder) == {f"version.{3 if forward else 2}", "working"}


def _folders(folder: Path) -> set[str]:
    return {one.name for one in folder.iterdir() if one.is_dir()}


def test_a_version_can_be_prepared_again(store: RocksDbStore) -> None:
    store.write("a", EDGES[:2], some_records(2))
    store.prepare_commit(1)
    store.write("a", EDGES[2:4], some_records(2))
    store.prepare_commit(1, {"try": "second"})
    store.commit(1)
    assert store.notes() == {"try": "second"}
    assert size(store, "a") == 4


def test_the_run_it_belongs_to_is_remembered(folder: Path) -> None:
    store = open_store(folder)
    store.write_identity(RankStoreIdentity("abc", 1, 4))
    store.close()
    store = open_store(folder)
    assert store.current_state.part == RankStoreIdentity("abc", 1, 4)
    store.close()


def test_keys_are_int64_whatever_their_layout(store: RocksDbStore) -> None:
    keys: Keys = np.arange(20)[::2]
    store.write("a", keys, some_records(20)[::2])
    records, found = store.read("a", keys)
    assert found.all()
    np.testing.assert_array_equal(records, some_records(20)[::2])


# ---------------------------------------------------------------------- what is refused


def test_another_description_or_width_is_refused_with_both(folder: Path) -> None:
    open_store(folder).close()
    with pytest.raises(SetupError, match=r"tables\.a\.dimension is 9 in the store and 12 here"):
        RocksDbStore(folder, {"a": WIDTH, "b": 8}, {"a": {"dimension": 12}})
    with pytest.raises(SetupError, match=r"widths\.a is 40 in the store and 52 here"):
        RocksDbStore(folder, {"a": 52, "b": 8}, {"a": {"dimension": 9}})
    with pytest.raises(SetupError, match=r"widths\.c is None in the store and 4 here"):
        RocksDbStore(folder, {"a": WIDTH, "b": 8, "c": 4}, {"a": {"dimension": 9}})
    open_store(folder).close()


def test_a_folder_in_use_is_refused_at_once(store: RocksDbStore, folder: Path, ranks: Nursery) -> None:
    with pytest.raises(SetupError, match="in use by this process"):
        open_store(folder)
    (ended,) = ranks.run(_open_here, 1, str(folder))
    assert ended.value.kind == "SetupError"
    assert "in use by another process" in ended.value.text
    store.write("a", EDGES, some_records(len(EDGES)))
    commit(store)


def _open_here(here: Here, folder: str) -> None:
    open_store(Path(folder))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SetupError, match="cannot be written"):
        open_store(tmp_path / "file")
    with pytest.raises(SetupError, match="cannot be written"):
        open_store(tmp_path / "file" / "below")


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("my only copy")
    with pytest.raises(SetupError, match=r"has thesis.txt, but no store\.json"):
        open_store(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "my only copy"


def test_a_scan_gives_what_was_there_at_its_beginning(store: RocksDbStore) -> None:
    store.write("a", EDGES, some_records(len(EDGES)))
    scan = store.scan("a", 3)
    first, _ = next(scan)
    store.erase("a", EDGES)
    store.write("a", np.array([77]), some_records(1))
    assert sorted([*first, *(key for keys, _ in scan for key in keys)]) == sorted(EDGES)
    assert size(store, "a") == 1


def test_a_scan_of_wide_records_is_of_few_at_a_time(folder: Path) -> None:
    width = 3 * 2**19
    store = RocksDbStore(folder, {"a": width})
    store.recover(0)
    store.write("a", np.arange(5), np.arange(5, dtype=np.uint8)[:, None].repeat(width, 1))
    parts = [(keys.tolist(), records[:, -1].tolist()) for keys, records in store.scan("a")]
    assert parts == [([0, 1], [0, 1]), ([2, 3], [2, 3]), ([4], [4])]
    store.close()


def test_a_folder_is_free_when_its_process_was_killed_and_a_child_of_that_lives_on(
    ranks: Nursery, tmp_path: Path
) -> None:
    (ended,) = ranks.run(_outlived_by_a_child, 1, str(tmp_path / "store"))
    assert ended.code == 0, told([ended])
    assert ended.value == "opened"


def _outlived_by_a_child(here: Here, folder: str) -> str:
    """A process opens the store, forks a child and is killed; then the store is opened."""
    (wait, go_on), (ready, tell) = os.pipe(), os.pipe()
    holder = os.fork()
    if holder == 0:
        os.close(go_on)
        open_store(Path(folder))
        child = os.fork()
        os.write(tell, b"!")
        if child == 0:
            os.read(wait, 1)  # until the other end is closed
            os._exit(0)
        signal.pause()
    assert os.read(ready, 1) + os.read(ready, 1) == b"!!"
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    try:
        open_store(Path(folder)).close()
    finally:
        os.close(go_on)
    return "opened"
