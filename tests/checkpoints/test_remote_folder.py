"""A checkpoint at a URL is complete or absent, in a file system without a rename of folders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_pipe.checkpoints.remote_folder import (
    RemotePath,
    begin_remote_checkpoint,
    finish_remote_checkpoint,
    follow_checkpoint_marker,
    local_copy,
    parse_local_or_remote_path,
    remove_remote_checkpoint,
)
from lightning_pipe.engine import SetupError

URL = "memory://runs/last.ckpt"


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    MemoryFileSystem.store.clear()


def place(url: str = URL) -> RemotePath:
    found = parse_local_or_remote_path(url)
    assert isinstance(found, RemotePath)
    return found


def saved(content: bytes, url: str = URL) -> str:
    to = place(url)
    written = begin_remote_checkpoint(to)
    (to.parent / written / "meta.pt").write_bytes(content)
    finish_remote_checkpoint(to, written)
    return written


def content_at(url: str = URL) -> bytes:
    folder = follow_checkpoint_marker(place(url))
    assert isinstance(folder, RemotePath)
    with (folder / "meta.pt").open("rb") as stream:
        return stream.read()


def names() -> list[str]:
    return sorted(MemoryFileSystem.store)


def test_it_is_there_once_it_is_finished_and_not_before() -> None:
    to = place()
    written = begin_remote_checkpoint(to)
    (to.parent / written / "meta.pt").write_bytes(b"one")
    assert not to.exists()
    finish_remote_checkpoint(to, written)
    assert to.is_file()
    assert content_at() == b"one"


def test_a_new_one_replaces_the_old_one_in_one_step_and_nothing_is_left_of_it() -> None:
    first = saved(b"one")
    to = place()
    written = begin_remote_checkpoint(to)
    (to.parent / written / "meta.pt").write_bytes(b"two")
    assert content_at() == b"one"
    finish_remote_checkpoint(to, written)
    assert content_at() == b"two"
    assert not [name for name in names() if first in name]


def test_what_an_interrupted_save_has_left_is_ignored_and_removed_by_the_next() -> None:
    saved(b"one")
    to = place()
    left = begin_remote_checkpoint(to)
    (to.parent / left / "meta.pt").write_bytes(b"half")
    assert content_at() == b"one"
    saved(b"two")
    assert content_at() == b"two"
    assert len(names()) == 2


def test_folders_of_others_stay() -> None:
    saved(b"one", "memory://runs/last.ckpt")
    saved(b"two", "memory://runs/last.ckpt.old")
    place("memory://runs/.last.ckpt.mine/x").write_bytes(b"mine")
    saved(b"three", "memory://runs/last.ckpt")
    assert content_at("memory://runs/last.ckpt.old") == b"two"
    assert "/runs/.last.ckpt.mine/x" in names()


def test_a_removed_one_is_gone_with_its_files() -> None:
    saved(b"one")
    saved(b"two", "memory://runs/other.ckpt")
    remove_remote_checkpoint(place())
    assert not place().exists()
    assert len(names()) == 2


def test_a_folder_at_the_url_is_read_and_not_replaced() -> None:
    """It is a local checkpoint that was uploaded."""
    place(f"{URL}/meta.pt").write_bytes(b"by hand")
    assert content_at() == b"by hand"
    with pytest.raises(SetupError, match="is a folder, which cannot be replaced"):
        begin_remote_checkpoint(place())
    remove_remote_checkpoint(place())
    assert names() == []


@pytest.mark.parametrize(
    "marker",
    [
        b"\xff\xfe",
        b"[" * 4000,
        json.dumps({"lightning_pipe_checkpoint": 1, "folder": "../other/.last.ckpt.0123456789abcdef"}).encode(),
        json.dumps({"lightning_pipe_checkpoint": 1, "folder": 3}).encode(),
    ],
)
def test_any_other_file_at_the_url_leads_nowhere(marker: bytes) -> None:
    place().write_bytes(marker)
    assert str(follow_checkpoint_marker(place())) == URL


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("ftp://me:secret@host/last.ckpt", "contains a password"),
        ("s3://me:sec/ret@bucket/last.ckpt", "contains a password"),
        ("memory://runs/a[1].ckpt", "contains *, ?, [ or ::"),
        ("https://host/last.ckpt?Signature=secret", "contains *, ?, [ or ::"),
        ("nosuchprotocol://runs/last.ckpt", "cannot be used"),
        (Path("s3://bucket/last.ckpt"), "a Path, which cannot be a URL"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: Any, said: str) -> None:
    with pytest.raises(SetupError, match=re.escape(said)) as caught:
        parse_local_or_remote_path(url)
    assert "secret" not in str(caught.value)
    assert "sec/ret" not in str(caught.value)


@pytest.mark.parametrize("url", ["memory:///last.ckpt", "memory://last.ckpt"])
def test_a_file_of_no_folder_is_kept_where_it_is(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved(b"one", url)
    assert content_at(url) == b"one"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("refused", [PermissionError("Forbidden"), OSError(5, "SlowDown"), ValueError("of the store")])
def test_a_request_that_fails_is_no_absent_checkpoint(refused: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(b"one")
    before = dict(MemoryFileSystem.store)

    def info(self: MemoryFileSystem, path: str, **options: Any) -> Any:
        raise refused

    with monkeypatch.context() as patched:
        patched.setattr(MemoryFileSystem, "info", info)
        with pytest.raises(OSError, match=str(refused.args[-1])):
            begin_remote_checkpoint(place())
        with pytest.raises(SetupError, match=str(refused.args[-1])):
            follow_checkpoint_marker(place())
    assert before == MemoryFileSystem.store
    assert content_at() == b"one"


def test_a_local_path_stays_one(tmp_path: Path) -> None:
    assert parse_local_or_remote_path("runs/last.ckpt") == Path("runs/last.ckpt")
    assert parse_local_or_remote_path(f"file://{tmp_path}/last.ckpt") == tmp_path / "last.ckpt"
    assert parse_local_or_remote_path(tmp_path) == tmp_path
    assert follow_checkpoint_marker(tmp_path) == tmp_path


def test_a_part_is_uploaded_and_comes_back(tmp_path: Path) -> None:
    (tmp_path / "rows" / "bags").mkdir(parents=True)
    (tmp_path / "rows" / "bags" / "people.pt").write_bytes(b"rows")
    folder = place("memory://runs/folder")
    folder.upload(tmp_path)
    assert names() == ["/runs/folder/rows/bags/people.pt"]
    with local_copy(folder, "rows") as copy:
        assert (copy / "rows" / "bags" / "people.pt").read_bytes() == b"rows"
    assert not copy.exists()


def test_a_file_is_read_in_parts() -> None:
    place().write_bytes(bytes(range(100)))
    with place().open("rb") as stream:
        assert stream.seek(-10, 2) == 90
        assert stream.read() == bytes(range(90, 100))
        stream.seek(5)
        assert stream.read(3) == b"\x05\x06\x07"


def test_old_files_that_cannot_be_removed_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    saved(b"one")

    def forbidden(self: RemotePath) -> None:
        raise PermissionError("Access Denied")

    to = place()
    written = begin_remote_checkpoint(to)
    (to.parent / written / "meta.pt").write_bytes(b"two")
    monkeypatch.setattr(RemotePath, "remove", forbidden)
    with pytest.warns(UserWarning, match="could not be removed: Access Denied"):
        finish_remote_checkpoint(to, written)
    assert content_at() == b"two"
