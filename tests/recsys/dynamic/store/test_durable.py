"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lightning_pipe.recsys.dynamic.store import durable


def test_what_was_written_is_read(tmp_path: Path) -> None:
    for value in ({"a": [1, "é"]}, {}, {"a": 2}):
        durable.write_json(tmp_path / "one.json", value)
        assert durable.read_json(tmp_path / "one.json") == value
    assert [file.name for file in tmp_path.iterdir()] == ["one.json"]


def test_any_changed_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    durable.write_json(path, {"version": 12})
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match="checksum"):
            durable.read_json(path)
        path.write_bytes(content[:place])
        with pytest.raises(ValueError, match="checksum"):
            durable.read_json(path)


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.json"
    durable.write_json(path, 1)

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        durable.write_json(path, 2)
    assert durable.read_json(path) == 1


def test_what_is_discarded_is_gone_and_need_not_be_there(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("x")
    (tmp_path / "trash.folder").mkdir()  # of a process that was killed
    (tmp_path / "trash.folder" / "old").write_text("x")
    (tmp_path / "file").write_text("x")
    for name in ("folder", "file", "nothing"):
        durable.discard(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "a file system without them"])
def test_shared_files_are_linked_and_others_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "rows.sst").write_text("rows")
    (source / "names").write_text("names")
    if not links:

        def fail(one: Path, other: Path) -> None:
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(os, "link", fail)
    durable.link_files(source, tmp_path / "target", ["rows.sst", "names"], ".sst")
    assert {file.name: file.read_text() for file in (tmp_path / "target").iterdir()} == {
        "rows.sst": "rows",
        "names": "names",
    }
    assert (source / "rows.sst").samefile(tmp_path / "target" / "rows.sst") == links
    assert not (source / "names").samefile(tmp_path / "target" / "names")
