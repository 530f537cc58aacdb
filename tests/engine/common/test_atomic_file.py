"""A file is there whole or as it was before."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lightning_pipe.engine.common.atomic_file import atomic_write


def test_what_was_written_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "plan.yaml"
    for text in ("first", "second"):
        with atomic_write(path) as unfinished:
            assert unfinished != path
            assert unfinished.suffix == path.suffix
            unfinished.write_text(text)
        assert path.read_text() == text
    assert list(path.parent.iterdir()) == [path]


def test_a_writer_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("before")

    def write_half() -> None:
        with atomic_write(path) as unfinished:
            unfinished.write_text("half")
            raise ValueError("half")

    with pytest.raises(ValueError, match="half"):
        write_half()
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("before")
    path.chmod(0o640)
    with atomic_write(path) as unfinished:
        unfinished.write_text("whole")
    assert path.read_text() == "whole"
    assert path.stat().st_mode & 0o777 == 0o640


def test_the_content_is_on_the_disk_before_its_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "folder" / "plan.yaml"
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def noted_sync(descriptor: int) -> None:
        done.append(f"sync {os.readlink(f'/proc/self/fd/{descriptor}')}")
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            assert os.fstat(descriptor).st_size == len("whole")
        sync(descriptor)

    def noted_replace(source: Path, target: Path) -> None:
        done.append(f"{source} becomes {target}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "replace", noted_replace)
    with atomic_write(path) as unfinished:
        unfinished.write_text("whole")
    # Any of the folders above may be new, whoever has made it.
    folders = [f"sync {folder}" for folder in path.resolve().parents]
    assert done[:2] == [f"sync {unfinished}", f"{unfinished} becomes {path}"]
    assert done[2:] == folders
