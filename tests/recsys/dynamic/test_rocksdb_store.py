"""A store of rows: what it keeps, what it forgets, what it refuses, and what a kill leaves of it."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_pipe.engine.errors import SetupError
from lightning_pipe.recsys.dynamic.rocksdb_store import RocksDbStore
from lightning_pipe.recsys.dynamic.row_store import Keys, Records, RunPart, StoreState
from tests.faults.forked_ranks import Here, Nursery, told
from tests.recsys.dynamic.killed_ranks import Kill, Seen, expected, make, noted, see, train_alone

WIDTH = 40
EDGES = np.array([0, -1, 1, 2**63 - 1, -(2**63), 255, 256, -256, 2**40, -(2**40)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "rank_0"


def _open(folder: Path, version: int | None = None, **options: Any) -> RocksDbStore:
    store = RocksDbStore(folder, {"a": WIDTH, "b": 8}, {"a": {"dimension": 9}}, **options)
    try:
        store.settle(store.state.committed if version is None else version)
    except SetupError:
        store.close()
        raise
    return store


def _records(count: int, seed: int = 0, width: int = WIDTH) -> Records:
    return np.random.default_rng(seed).integers(0, 256, (count, width), dtype=np.uint8)


def _commit(store: RocksDbStore, **notes: str) -> None:
    version = store.state.committed + 1
    store.prepare(version, notes)
    store.commit(version)


@pytest.fixture
def store(folder: Path) -> Iterator[RocksDbStore]:
    store = _open(folder)
    yield store
    store.close()


# ---------------------------------------------------------------------- records


def test_reads_see_what_was_written_last_for_any_key(store: RocksDbStore) -> None:
    store.write("a", EDGES, _records(len(EDGES), seed=1))
    store.write("a", EDGES[::2], _records(len(EDGES[::2]), seed=2))
    keys = np.random.default_rng(0).permutation(EDGES)
    records, found = store.read("a", keys)
    assert found.all()
    wanted = _records(len(EDGES), seed=1)
    wanted[::2] = _records(len(EDGES[::2]), seed=2)
    np.testing.assert_array_equal(records[np.argsort(keys)], wanted[np.argsort(EDGES)])


def test_keys_that_are_not_there_are_told_from_those_that_are(store: RocksDbStore) -> None:
    store.write("a", EDGES[:5], _records(5))
    store.erase("a", EDGES[1:2])
    store.erase("a", np.array([77]))
    records, found = store.read("a", EDGES)
    assert found.tolist() == [True, False, True, True, True] + [False] * 5
    np.testing.assert_array_equal(records[found], _records(5)[[0, 2, 3, 4]])


def test_tables_do_not_see_each_other(store: RocksDbStore) -> None:
    store.write("a", EDGES, _records(len(EDGES)))
    store.write("b", EDGES[:2], _records(2, width=8))
    assert (store.count("a"), store.count("b")) == (len(EDGES), 2)
    records, found = store.read("b", EDGES[:3])
    assert found.tolist() == [True, True, False]
    np.testing.assert_array_equal(records[:2], _records(2, width=8))


def test_no_keys_are_no_work(store: RocksDbStore) -> None:
    nothing = np.empty(0, np.int64)
    store.write("a", nothing, _records(0))
    store.erase("a", nothing)
    records, found = store.read("a", nothing)
    assert records.shape == (0, WIDTH)
    assert found.shape == (0,)
    assert list(store.scan("a")) == []
    assert store.count("a") == 0


@pytest.mark.parametrize("readers", [1, 8])
def test_large_reads_shared_by_several_threads_are_in_order(folder: Path, readers: int) -> None:
    store = _open(folder, readers=readers, write_buffer=1 << 16)
    keys = np.random.default_rng(3).permutation(np.arange(-4000, 4000)) * 10**15
    store.write("a", keys, _records(len(keys)))
    records, found = store.read("a", keys)
    assert found.all()
    np.testing.assert_array_equal(records, _records(len(keys)))
    store.close()


@pytest.mark.parametrize("chunk", [1, 3, 10, 1000])
def test_a_scan_gives_each_record_once_in_the_order_of_keys(store: RocksDbStore, chunk: int) -> None:
    store.write("a", EDGES, _records(len(EDGES)))
    store.write("b", EDGES, _records(len(EDGES), width=8))
    parts = list(store.scan("a", chunk))
    assert max(len(keys) for keys, _ in parts) == min(chunk, len(EDGES))
    order = np.argsort(EDGES)
    np.testing.assert_array_equal(np.concatenate([keys for keys, _ in parts]), EDGES[order])
    np.testing.assert_array_equal(np.concatenate([records for _, records in parts]), _records(len(EDGES))[order])


# ---------------------------------------------------------------------- versions


def test_a_commit_survives_and_what_came_after_it_does_not(folder: Path) -> None:
    store = _open(folder)
    store.write("a", EDGES, _records(len(EDGES)))
    _commit(store, step="7")
    store.write("a", EDGES, _records(len(EDGES), seed=1))
    store.write("a", np.array([5]), _records(1))
    store.erase("a", EDGES[:3])
    store.close()
    store = _open(folder)
    assert store.state == StoreState(1, None)
    assert store.notes() == {"step": "7"}
    records, found = store.read("a", np.append(EDGES, 5))
    assert found.tolist() == [True] * len(EDGES) + [False]
    np.testing.assert_array_equal(records[:-1], _records(len(EDGES)))
    store.close()


def test_what_a_version_erases_stays_away(folder: Path) -> None:
    store = _open(folder)
    store.write("a", EDGES, _records(len(EDGES)))
    _commit(store)
    store.erase("a", EDGES[:4])
    _commit(store)
    store.close()
    store = _open(folder)
    assert store.count("a") == len(EDGES) - 4
    assert store.read("a", EDGES)[1].tolist() == [False] * 4 + [True] * (len(EDGES) - 4)
    store.close()


@pytest.mark.parametrize("forward", [False, True])
def test_a_prepared_version_is_taken_or_forgotten_as_asked(folder: Path, forward: bool) -> None:
    store = _open(folder)
    store.write("a", EDGES[:2], _records(2))
    _commit(store, step="1")
    store.write("a", EDGES[2:3], _records(1))
    store.prepare(2, {"step": "2"})
    store.close()
    store = RocksDbStore(folder, {"a": WIDTH, "b": 8}, {"a": {"dimension": 9}})
    assert store.state == StoreState(1, 2)
    store.settle(2 if forward else 1)
    assert store.state == StoreState(2 if forward else 1, None)
    assert store.notes() == {"step": "2" if forward else "1"}
    assert store.count("a") == (3 if forward else 2)
    _commit(store)
    store.close()
    assert _folders(folder) == {f"version.{3 if forward else 2}", "working"}


def _folders(folder: Path) -> set[str]:
    return {one.name for one in folder.iterdir() if one.is_dir()}


def test_a_version_can_be_prepared_again(store: RocksDbStore) -> None:
    store.write("a", EDGES[:2], _records(2))
    store.prepare(1)
    store.write("a", EDGES[2:4], _records(2))
    store.prepare(1, {"try": "second"})
    store.commit(1)
    assert store.notes() == {"try": "second"}
    assert store.count("a") == 4


def test_versions_out_of_order_are_refused(store: RocksDbStore) -> None:
    with pytest.raises(SetupError, match="version 2 is to be prepared; the next is 1"):
        store.prepare(2)
    with pytest.raises(SetupError, match="version 1 is to be committed; the one prepared is None"):
        store.commit(1)
    with pytest.raises(SetupError, match="needed is one call"):
        store.settle(0)


def test_a_version_that_is_not_there_cannot_be_settled_at(folder: Path) -> None:
    store = RocksDbStore(folder, {"a": WIDTH})
    with pytest.raises(SetupError, match="version 3 is asked for; the store has version 0 committed and None prepared"):
        store.settle(3)
    store.close()


def test_the_run_it_belongs_to_is_remembered(folder: Path) -> None:
    store = _open(folder)
    store.join(RunPart("abc", 1, 4))
    store.close()
    store = _open(folder)
    assert store.state.part == RunPart("abc", 1, 4)
    store.close()


def test_before_settle_and_after_close_it_says_so(folder: Path) -> None:
    store = RocksDbStore(folder, {"a": WIDTH})
    with pytest.raises(SetupError, match=r"call settle\(\) first"):
        store.read("a", EDGES)
    store.settle(0)
    store.close()
    store.close()
    with pytest.raises(SetupError, match="closed"):
        store.write("a", EDGES, _records(len(EDGES)))


# ---------------------------------------------------------------------- kills


def _look_alone(here: Here, folder: str, version: int | None) -> tuple[StoreState, Seen | None]:
    store = make(Path(folder), 0)
    state = store.state
    if version is None:
        version = state.committed
    store.settle(version)
    seen = see(store)
    store.close()
    return state, seen


def _lines(ranks: Nursery, folder: Path) -> int:
    (ended,) = ranks.run(train_alone, 1, str(folder), 2, None)
    assert isinstance(ended.value, int), told([ended])
    return ended.value


def test_killed_before_any_line_it_has_the_committed_version_and_perhaps_the_prepared_one(
    ranks: Nursery, tmp_path: Path
) -> None:
    lines = _lines(ranks, tmp_path / "whole")
    for line in range(1, lines, max(1, lines // 25)):
        folder = tmp_path / str(line)
        (ended,) = ranks.run(train_alone, 1, str(folder), 2, Kill(0, line=line))
        assert ended.code == -9, told([ended])
        _check(ranks, folder)


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_time_again_and_again(ranks: Nursery, tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    versions = 0
    for _ in range(8):
        versions += 2
        ranks.run(train_alone, 1, str(tmp_path), versions, Kill(0, seconds=rng.uniform(0, 0.3)))
        versions = _check(ranks, tmp_path, before=versions - 2)


def _check(ranks: Nursery, folder: Path, before: int = 0) -> int:
    """Both the version that is committed and the one that is prepared are exactly what was written.

    Args:
        ranks: to look with.
        folder: of the run that was killed.
        before: the version that it began with.
    """
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    if not (folder / "rank_0").exists():
        assert before == 0
        return 0
    shutil.copytree(folder / "rank_0", copy / "rank_0")
    said = {kind: max((int(one.split()[1]) for one in noted(folder, 0) if kind in one), default=0) for kind in _KINDS}
    (ended,) = ranks.run(_look_alone, 1, str(folder), None)
    assert ended.code == 0, told([ended])
    state, seen = ended.value
    done = max(said["committed"], before)
    assert state.committed in (done, done + 1)
    assert state.committed + (state.prepared is not None) >= said["prepared"]
    assert seen.rows == expected(state.committed, 0)
    if state.prepared is not None:
        (ended,) = ranks.run(_look_alone, 1, str(copy), state.prepared)
        assert ended.code == 0, told([ended])
        assert ended.value[1].rows == expected(state.prepared, 0)
        assert ended.value[1].notes == {"step": str(state.prepared)}
    return int(state.committed)


_KINDS = ("prepared", "committed")


# ---------------------------------------------------------------------- what is refused


def test_another_description_or_width_is_refused_with_both(folder: Path) -> None:
    _open(folder).close()
    with pytest.raises(SetupError, match=r"tables\.a\.dimension is 9 in the store and 12 here"):
        RocksDbStore(folder, {"a": WIDTH, "b": 8}, {"a": {"dimension": 12}})
    with pytest.raises(SetupError, match=r"widths\.a is 40 in the store and 52 here"):
        RocksDbStore(folder, {"a": 52, "b": 8}, {"a": {"dimension": 9}})
    with pytest.raises(SetupError, match=r"widths\.c is None in the store and 4 here"):
        RocksDbStore(folder, {"a": WIDTH, "b": 8, "c": 4}, {"a": {"dimension": 9}})
    _open(folder).close()


def test_a_folder_in_use_is_refused_at_once(store: RocksDbStore, folder: Path, ranks: Nursery) -> None:
    with pytest.raises(SetupError, match="in use by this process"):
        _open(folder)
    (ended,) = ranks.run(_open_here, 1, str(folder))
    assert ended.value.kind == "SetupError"
    assert "in use by another process" in ended.value.text
    store.write("a", EDGES, _records(len(EDGES)))
    _commit(store)


def _open_here(here: Here, folder: str) -> None:
    _open(Path(folder))


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SetupError, match="cannot be written"):
        _open(tmp_path / "file")
    with pytest.raises(SetupError, match="cannot be written"):
        _open(tmp_path / "file" / "below")


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("my only copy")
    with pytest.raises(SetupError, match=r"has thesis.txt, but no store\.json"):
        _open(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "my only copy"


# ---------------------------------------------------------------------- damage


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x5A]) + content[middle + 1 :]


def _flip_last(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 0x5A])


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "flipped in the middle": _flip,
    "flipped at the end": _flip_last,
    "cut in half": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "longer": lambda content: content + bytes(64),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of one version, of several files."""
    folder = tmp_path_factory.mktemp("whole") / "store"
    store = _open(folder, write_buffer=1 << 16)
    keys = np.arange(6000) * 10**12
    store.write("a", keys, _records(len(keys)))
    _commit(store, step="1")
    store.close()
    shutil.rmtree(folder / "working")
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_found_or_without_effect(whole: Path, tmp_path: Path, damage: str) -> None:
    files = [file.relative_to(whole) for file in sorted(whole.rglob("*")) if file.is_file() and file.stat().st_size]
    assert {file.suffix for file in files} >= {".sst", ".json"}
    refused = set()
    for file in files:
        folder = tmp_path / "damaged"
        shutil.copytree(whole, folder)
        (folder / file).write_bytes(DAMAGES[damage]((whole / file).read_bytes()))
        refusal = _refusal(folder)
        if refusal is not None:
            assert f"{folder} is damaged" in refusal
            refused.add(file)
        shutil.rmtree(folder)
    assert set(files) - refused == set()


def test_any_changed_byte_is_found_or_without_effect(whole: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    refused = 0
    for file in (whole / "version.1").glob("*.sst"):
        folder = tmp_path / "damaged"
        shutil.copytree(whole, folder)
        content = bytearray(file.read_bytes())
        for place in rng.integers(0, len(content), 8):
            content[place] ^= 1 << int(rng.integers(8))
            (folder / "version.1" / file.name).write_bytes(content)
            refusal = _refusal(folder)
            assert refusal is None or f"{folder} is damaged" in refusal
            refused += refusal is not None
            content[:] = file.read_bytes()
        shutil.rmtree(folder)
    assert refused > 0


def _refusal(folder: Path) -> str | None:
    """Reads everything; what the error says, None where everything is as it was written."""
    try:
        _read_all(folder)
    except SetupError as error:
        return str(error)
    return None


def _read_all(folder: Path) -> None:
    store = _open(folder)
    try:
        keys = np.arange(6000) * 10**12
        records, found = store.read("a", keys)
        assert found.all()
        np.testing.assert_array_equal(records, _records(len(keys)))
        assert sum(len(keys) for keys, _ in store.scan("a")) == len(keys)
    finally:
        store.close()


def test_a_scan_over_a_damaged_block_does_not_end_early(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(whole, folder)
    for file in (folder / "version.1").glob("*.sst"):
        file.write_bytes(_flip(file.read_bytes()))
    store = _open(folder)
    with pytest.raises(SetupError, match="damaged"):
        list(store.scan("a", chunk=500))
    with pytest.raises(SetupError, match="damaged"):
        store.count("a")
    store.close()


def test_a_missing_file_is_found(whole: Path, tmp_path: Path) -> None:
    for file in ("version.1/CURRENT", "committed.json", "version.1/contents.json", "store.json"):
        folder = tmp_path / "damaged"
        shutil.copytree(whole, folder)
        (folder / file).unlink()
        with pytest.raises(SetupError, match="damaged"):
            _open(folder, 1)
        shutil.rmtree(folder)


# ---------------------------------------------------------------------- a full disk


def _fill(folder: Path) -> str:
    """Writes and commits until it cannot; what the error says."""
    store = _open(folder, write_buffer=1 << 20)
    try:
        for version in range(2, 200):
            for part in range(4):
                store.write("a", np.arange(10000) + 10000 * (4 * version + part), _records(10000, seed=version))
            store.prepare(version)
            store.commit(version)
    except SetupError as error:
        return f"{version - 1} {error}"
    finally:
        store.close()
    return "no error"


def _fill_limited(here: Here, folder: str) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (6 << 20, 6 << 20))
    return _fill(Path(folder))


def _first_version(folder: Path) -> None:
    store = _open(folder)
    store.write("a", EDGES, _records(len(EDGES)))
    _commit(store)
    store.close()


def _whole_after(folder: Path, text: str) -> None:
    assert "cannot be written" in text
    assert "what was committed is whole" in text
    store = _open(folder)
    assert store.state == StoreState(int(text.split()[0]), None)
    assert store.count("a") == len(EDGES) + 40000 * (store.state.committed - 1)
    np.testing.assert_array_equal(store.read("a", EDGES)[0], _records(len(EDGES)))
    _commit(store)
    store.close()


def test_files_that_cannot_grow_stop_it_with_the_last_commit_whole(ranks: Nursery, folder: Path) -> None:
    _first_version(folder)
    (ended,) = ranks.run(_fill_limited, 1, str(folder))
    assert ended.code == 0, told([ended])
    _whole_after(folder, ended.value)


def test_a_full_disk_stops_it_with_the_last_commit_whole(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(["mount", *options], capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    try:
        _first_version(disk / "store")
        text = _fill(disk / "store")
        # Room for the next try.
        subprocess.run(["mount", "-o", "remount,size=96m", str(disk)], check=True)
        _whole_after(disk / "store", text)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(SetupError, match="cannot be written"):
            _open(disk / "store")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_keys_are_int64_whatever_their_layout(store: RocksDbStore) -> None:
    keys: Keys = np.arange(20)[::2]
    store.write("a", keys, _records(20)[::2])
    records, found = store.read("a", keys)
    assert found.all()
    np.testing.assert_array_equal(records, _records(20)[::2])
