"""Damaged files and full disks: an error that says so, or no effect."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lightning_pipe.engine.common.errors import SetupError
from lightning_pipe.recsys.dynamic.store.row_store import StoreState
from tests.recsys.dynamic.small_stores import EDGES, commit, open_store, size, some_records
from tests.scenarios.faults.forked_ranks import Here, Nursery, told


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
    store = open_store(folder, write_buffer=1 << 16)
    keys = np.arange(6000) * 10**12
    store.write("a", keys, some_records(len(keys)))
    commit(store, step="1")
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
    # None of these is read: RocksDB and rocksdict write them for others.
    unread = ("OPTIONS", "IDENTITY", "rocksdict-config")
    without_effect = {file for file in set(files) - refused if not file.name.startswith(unread)}
    # Zeros at the end of a log of RocksDB are room that it has not used.
    assert without_effect == {file for file in files if damage == "longer" and file.name.startswith("MANIFEST")}


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
    store = open_store(folder)
    try:
        keys = np.arange(6000) * 10**12
        records, found = store.read("a", keys)
        assert found.all()
        np.testing.assert_array_equal(records, some_records(len(keys)))
        assert sum(len(keys) for keys, _ in store.scan("a")) == len(keys)
    finally:
        store.close()


def test_a_scan_over_a_damaged_block_does_not_end_early(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(whole, folder)
    file = max((folder / "version.1").glob("*.sst"), key=lambda file: file.stat().st_size)
    file.write_bytes(_flip(file.read_bytes()))
    store = open_store(folder)
    with pytest.raises(SetupError, match="damaged"):
        list(store.scan("a", chunk=500))
    store.close()


def test_a_missing_file_is_found(whole: Path, tmp_path: Path) -> None:
    for file in ("version.1/CURRENT", "store.json", next((whole / "version.1").glob("*.sst")).relative_to(whole)):
        folder = tmp_path / "damaged"
        shutil.copytree(whole, folder)
        (folder / file).unlink()
        with pytest.raises(SetupError, match="damaged"):
            open_store(folder, 1)
        shutil.rmtree(folder)


# ---------------------------------------------------------------------- a full disk


def _fill(folder: Path) -> str:
    """Writes and commits until it cannot; what the error says."""
    store = open_store(folder, write_buffer=1 << 20)
    try:
        for version in range(2, 200):
            for part in range(4):
                store.write("a", np.arange(10000) + 10000 * (4 * version + part), some_records(10000, seed=version))
            store.prepare_commit(version)
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
    store = open_store(folder)
    store.write("a", EDGES, some_records(len(EDGES)))
    commit(store)
    store.close()


def _whole_after(folder: Path, text: str) -> None:
    assert "cannot be written" in text
    assert "The committed version is intact" in text
    store = open_store(folder)
    assert store.current_state == StoreState(int(text.split()[0]), None)
    assert size(store, "a") == len(EDGES) + 40000 * (store.current_state.committed - 1)
    np.testing.assert_array_equal(store.read("a", EDGES)[0], some_records(len(EDGES)))
    commit(store)
    store.close()


def test_files_that_cannot_grow_stop_it_with_the_last_commit_whole(ranks: Nursery, tmp_path: Path) -> None:
    folder = tmp_path / "store"
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
            open_store(disk / "store")
    finally:
        subprocess.run(["umount", str(disk)], check=True)
